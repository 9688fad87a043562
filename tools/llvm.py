#!/usr/bin/env python3
"""Lays LLVM where a build with the feature `cuda` looks for it.

CubeCL compiles kernels for NVIDIA's GPUs by LLVM, and the build of its crate downloads LLVM from GitHub unless it finds one. This script
puts LLVM there from PyPI, where more networks let a build reach, and leaves out the targets that no kernel is compiled for. Needs Linux on
x86-64 and pip. Does nothing when LLVM is there.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "23.1.1.post0"
WHEELS = ("mlc-llvm-static", "mlc-llvm-static-extra-targets")
TARGET = "NVPTX"


def destination():
    """Where the crate `tracel-llvm-bundler` of Cargo.lock looks."""
    lock = (Path(__file__).resolve().parent.parent / "Cargo.lock").read_text()
    version = re.search(r'name = "tracel-llvm-bundler"\nversion = "([^"]+)"', lock)
    if not version:
        sys.exit("Cargo.lock names no tracel-llvm-bundler: CubeCL may find LLVM in another way now.")
    if version[1].split(".")[:2] != VERSION.split(".")[:2]:
        sys.exit(f"CubeCL wants LLVM {version[1]}, and this script knows {VERSION}: name its wheels here.")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(data) / "tracel" / f"tracel-llvm-{version[1]}"


def download(folder):
    """Downloads the wheels and unpacks them into the folder; returns the folder of LLVM."""
    names = [f"{wheel}=={VERSION}" for wheel in WHEELS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    subprocess.run([*pip, "--dest", folder, *names], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder)
    return folder / "mlc_llvm_static" / "static"


def keep_one_target(llvm):
    """Takes the other targets out of what LLVM's headers and `llvm-config` list."""
    for listed in (llvm / "include/llvm/Config/mlc-all").glob("*.def"):
        lines = listed.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not re.match(r"LLVM_\w+\(", line) or f"({TARGET})" in line]
        listed.write_text("".join(kept))

    # The machine's own target belongs to CubeCL's runtime for CPUs, which no program here has.
    config = llvm / "include/llvm/Config/llvm-config.h"
    config.write_text(re.sub(r"#define LLVM_NATIVE_\w+ LLVM\w+\n", "", config.read_text()))

    listed = llvm / "share/mlc-llvm-static/base.json"
    base = json.loads(listed.read_text())
    components = base["profiles"]["all"]["components"]
    others = set()
    for target in components["all-targets"]["requires"]:
        if target != TARGET.lower():
            others |= {target, *components[target]["requires"]}
    for name in ("all", "all-targets", "native", "nativecodegen"):
        components[name]["requires"] = [part for part in components[name]["requires"] if part not in others]
    listed.write_text(json.dumps(base))


def main():
    place = destination()
    sentinel = place / ".tracel-llvm-installed"
    if sentinel.exists():
        print(f"LLVM is at {place} already.")
        return
    if place.exists():
        sys.exit(f"{place} is there and unfinished: remove it first.")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        llvm = download(Path(folder))
        keep_one_target(llvm)
        (llvm / "bin/llvm-config").chmod(0o755)
        (llvm / sentinel.name).touch()
        llvm.rename(place)
    print(f"LLVM {VERSION} for {TARGET} is at {place}.")


if __name__ == "__main__":
    main()
