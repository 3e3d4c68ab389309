"""The folder of --save-hf as a transaction: whole or absent, and a kill at any moment leaves nothing that the run refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError, RunError
from megatron_rl.train.hf_export import PARTIAL, HFExport

FILES = ("config.json", "model-00001-of-00001.safetensors")


def write(export: HFExport) -> None:
    export.try_to_write()
    export.begin()
    for name in FILES:
        (export.partial / name).write_text(name)
    export.finish()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


class Killed(BaseException):
    pass


def killed_at(monkeypatch, number: int) -> None:
    """Each change of the file system after `number` of them ends the process; the last one is half done where it can be."""
    left = [number]

    def dying(before):
        def call(*args, **keywords):
            left[0] -= 1
            if left[0] < 0:
                if before is write_text:
                    Path(args[0]).touch()
                raise Killed
            return before(*args, **keywords)

        return call

    write_text = Path.write_text
    for name in ("write_text", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(os, "replace", dying(os.replace))


@pytest.mark.parametrize("is_again", [False, True], ids=["first time", "over its own folder"])
def test_a_run_goes_on_after_a_kill_at_any_moment_and_its_folder_is_whole_or_absent(tmp_path, is_again):
    folder = tmp_path / "hf"
    num_changes, ended = 0, False
    while not ended:
        if is_again and not folder.exists():
            write(HFExport(folder, "a"))
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, num_changes)
            try:
                write(HFExport(folder, "a"))
                ended = True
            except Killed:
                pass
        found = names_in(folder)
        assert found.issuperset(FILES) or not found, num_changes
        write(HFExport(folder, "a"))
        assert names_in(folder).issuperset(FILES) and names_in(tmp_path) == {"hf"}
        num_changes += 1
        if not is_again:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    assert num_changes > (10 if is_again else 6)


def test_a_kill_of_the_trial_stops_no_other_run(tmp_path):
    for number in range(4):
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, number)
            with pytest.raises(Killed):
                HFExport(tmp_path / "hf", f"run {number}").try_to_write()
    HFExport(tmp_path / "hf", "another").try_to_write()
    assert names_in(tmp_path) == set()


def test_what_another_run_or_a_person_wrote_is_refused_and_stays(tmp_path):
    folder, partial = tmp_path / "hf", tmp_path / ("hf" + PARTIAL)
    write(HFExport(folder, "a"))
    with pytest.raises(ConfigError, match="hf holds files already, which this run did not write: name a new folder"):
        HFExport(folder, "b").try_to_write()
    HFExport(tmp_path / "other", "a").begin()
    (tmp_path / ("other" + PARTIAL) / FILES[0]).touch()
    with pytest.raises(ConfigError, match="other.partial holds what another run left unfinished: remove that folder"):
        HFExport(tmp_path / "other", "b").try_to_write()
    partial.mkdir()
    (partial / "mine").touch()
    with pytest.raises(ConfigError, match="hf.partial holds what another run left unfinished"):
        HFExport(folder, "a").try_to_write()
    assert names_in(folder).issuperset(FILES) and names_in(partial) == {"mine"}


def test_a_place_where_nothing_can_be_made_is_found_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "hf", Path("/proc/nothing/hf")):
        with pytest.raises(ConfigError, match=r"is written as .*hf\.partial first, which cannot be made .*where you can"):
            HFExport(place, "a").try_to_write()


def test_a_disk_that_fails_at_the_end_is_named(tmp_path, monkeypatch):
    export = HFExport(tmp_path / "hf", "a")
    export.begin()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="hf cannot be written: No space left on device"):
        export.finish()


def test_an_empty_folder_may_be_there(tmp_path):
    (tmp_path / "hf").mkdir()
    write(HFExport(tmp_path / "hf", "a"))
    assert names_in(tmp_path / "hf").issuperset(FILES)
