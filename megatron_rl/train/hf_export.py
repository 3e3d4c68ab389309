"""The folder of --save-hf: tried at the start of a run, written beside its place, and moved there when it is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_rl.errors import ConfigError
from megatron_rl.files.json_values import read_json
from megatron_rl.train.hf_weights import MARKER
from megatron_rl.train.writers import names_what_cannot_be_written

PARTIAL, REPLACED = ".partial", ".replaced"


class HFExport:
    """One run's way to write a folder: `try_to_write` at the start, then `begin`, files into `partial`, and `finish`. On one rank.

    `folder` is whole whenever it is there. A kill at any moment leaves what the same run, resumed, takes as its own: `begin`
    removes its own unfinished folder, and `finish` replaces its own whole one. Files of another run or a person are never removed.
    """

    def __init__(self, folder: str | Path, run_id: str):
        self._given, self._run_id = folder, run_id
        self.folder = Path(os.path.realpath(folder))
        self.partial, self._replaced = (self.folder.with_name(self.folder.name + ending) for ending in (PARTIAL, REPLACED))

    def try_to_write(self) -> None:
        """Makes and removes the folder that is written first. ConfigError for a folder that is not this run's, and for a place
        where none can be made."""
        if _names_in(self.folder) and not self._is_own(self.folder):
            raise ConfigError(f"--save-hf {self._given} holds files already, which this run did not write: name a new folder")
        for beside in (self.partial, self._replaced):
            if set(_names_in(beside)) - {MARKER} and not self._is_own(beside):
                raise ConfigError(
                    f"--save-hf {self._given}: {beside} holds what another run left unfinished: remove that folder, if that run is "
                    "gone, or name another --save-hf"
                )
        try:
            self._make_partial()
            _remove(self.partial)
        except OSError as error:
            raise ConfigError(
                f"--save-hf {self._given} is written as {self.partial} first, which cannot be made ({error.strerror}): name a "
                "folder where you can write"
            ) from error

    def begin(self) -> None:
        """Makes `partial`, with nothing in it but the marker. RunError where it cannot be written."""
        with names_what_cannot_be_written(self.partial):
            self._make_partial()

    def finish(self) -> None:
        """Moves `partial` to its place. RunError where it cannot."""
        with names_what_cannot_be_written(self.folder):
            if self._is_own(self.folder):
                os.replace(self.folder, self._replaced)
            os.replace(self.partial, self.folder)  # an empty folder may be there
            _remove(self._replaced)

    def _make_partial(self) -> None:
        _remove(self.partial)
        _remove(self._replaced)
        self.partial.mkdir(parents=True)
        (self.partial / MARKER).write_text(json.dumps({"run_id": self._run_id}) + "\n", encoding="utf-8")

    def _is_own(self, folder: Path) -> bool:
        try:
            marker = read_json(folder / MARKER)
        except (OSError, ValueError):
            return False
        return isinstance(marker, dict) and marker.get("run_id") == self._run_id


def place_problem(save_hf: str, hf_checkpoint: str, output_dir: str) -> str | None:
    """Why no folder can be moved there, from what is there. Nothing is written."""
    folder, output, source = (os.path.realpath(path) for path in (save_hf, output_dir, hf_checkpoint))
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return "it is a file"
    if os.path.ismount(folder):
        return "a disk is mounted there"
    if folder == source:
        return "it is the folder of --hf-checkpoint"
    if output == folder or output.startswith(folder + os.sep):
        return f"it is the folder of --output-dir {output_dir}, or has it inside"
    return None


def _names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _remove(folder: Path) -> None:
    """If it is there; the marker last, so that after a kill it is still the run's own. OSError for what no run writes."""
    if folder.exists():
        for name in sorted(os.listdir(folder), key=lambda name: name == MARKER):
            (folder / name).unlink()
        folder.rmdir()
