"""The package's name, requirements and files. pyproject.toml holds the settings of tools."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

# The address of the repository, given where a release is built: REPOSITORY_URL=https://... python -m build. An index then shows the
# README with absolute addresses, and the project's links. In the repository all addresses are relative.
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "").rstrip("/")

# What a room needs beside torch. docs/structure.md has the rooms; tests/test_layering.py compares their imports with these lists.
# hosts/ has no extra, because a host brings its own packages.
EXTRAS = {
    # megatron/, and the rooms that run a model: train/ and testing/.
    # psutil: dist_checkpointing hangs without it, and megatron-core does not declare it.
    "megatron": ["megatron-core>=0.13", "psutil"],
    # 3.4, with torch 2.8: TRITON_OF_TORCH in megatron_rl/config.py lists what the kernels are compiled with in tests.
    "triton": ["triton>=3.4; platform_system == 'Linux'"],
    # For kernels on the CPU. Not for a CUDA torch, which pins its own triton.
    # 3.7: the interpreter of 3.6 fails on loops with numpy 2.4.
    "interpreter": ["triton>=3.7; platform_system == 'Linux'"],
    # train/
    # filelock: torch brings it; the lock of an output directory is one.
    "train": ["filelock>=3.14", "tqdm", "matplotlib", "tensorboard"],
    # train/ with --hf-checkpoint: configuration and tokenizer of the folder, and its files.
    "hf": ["transformers>=4.51,<6", "safetensors"],
    # pytest_megatron_rl.py, for the tests of a loss of your own.
    "testing": ["pytest>=8"],
    # benchmarks/
    "bench": ["liger-kernel", "matplotlib"],
    # mkdocs 1: .ci/site_links.py is a hook of it, and Material a theme for it. latex2mathml: formulas that need no script.
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "latex2mathml>=3.77"],
    # ruff and mypy: one minor version each, so that `make lint` says the same everywhere.
    "dev": ["pytest-xdist", "pytest-timeout", "hypothesis", "ruff>=0.17,<0.18", "mypy>=2.4,<2.5", "pre-commit"],
}
EXTRAS["dev"] += EXTRAS["testing"] + EXTRAS["train"] + EXTRAS["hf"]


def readme() -> str:
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

    def absolute(link: re.Match) -> str:
        words, address = link.groups()
        return f"{words}({REPOSITORY_URL}/{'raw' if words.startswith('!') else 'blob'}/main/{address})"

    return re.sub(r"(!?\[[^]]*\])\((?!https?://|#)([^)]+)\)", absolute, text) if REPOSITORY_URL else text


setup(
    name="megatron_rl",
    version="0.3.0",
    description="Exact policy-gradient losses for Megatron-Core: GRPO, GSPO and CISPO under every parallel layout",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The megatron_rl authors",
    project_urls={
        "Source": REPOSITORY_URL,
        "Documentation": f"{REPOSITORY_URL}/blob/main/docs/index.md",
        "Changelog": f"{REPOSITORY_URL}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY_URL}/issues",
    }
    if REPOSITORY_URL
    else {},
    python_requires=">=3.11",
    # An editable install is then a path file: a script beside the clone imports the package, and not the folder of the clone.
    package_dir={"": "."},
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    # A user's type checker reads the package's types too (PEP 561).
    package_data={"megatron_rl": ["py.typed"]},
    # Beside the package, because pytest loads it in every run: a run without its fixtures imports nothing of the package.
    py_modules=["pytest_megatron_rl"],
    # 2.8: the oldest whose Triton compiles the kernels. From 2.6 on torch.load with weights_only=True runs no code of a file.
    install_requires=["torch>=2.8", "packaging"],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megatron-rl = megatron_rl.__main__:main"],
        # verl loads it in each of its processes.
        "verl.plugins": ["megatron_rl = megatron_rl.hosts.verl_plugin"],
        # It has the module's name, so that `-p pytest_megatron_rl` and the entry point are one registration.
        "pytest11": ["pytest_megatron_rl = pytest_megatron_rl"],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
