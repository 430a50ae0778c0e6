# SPDX-License-Identifier: Apache-2.0
"""The files beside the sources that say how flashplan is packaged and cited."""

import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()


def test_images_are_those_of_the_documentation():
    commands = re.findall(r"docker build .*", DOCKERFILE)
    assert len(commands) == 2
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for command in commands:
        assert f"$ {command}\n" in INSTALL
        assert set(re.findall(r"--target (\w+)", command)) <= stages
        assert set(re.findall(r"--build-arg (\w+)=", command)) <= arguments
    assert set(re.findall(r"from=(\w+)", DOCKERFILE)) <= stages


def test_options_of_the_build_are_those_of_cmake():
    build = (ROOT / "CMakeLists.txt").read_text()
    build += "".join(path.read_text() for path in (ROOT / "cmake").glob("*.cmake"))
    options = set(re.findall(r"cmake\.define\.(\w+)", DOCKERFILE + INSTALL))
    assert "CMAKE_CUDA_ARCHITECTURES" in options
    for option in options:
        assert re.search(rf"\b{option}\b", build), option


def test_the_citation_has_what_the_format_requires():
    """Keys and types of version 1.2.0 of the Citation File Format."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    project = (ROOT / "pyproject.toml").read_text()
    assert f'name = "{citation["title"]}"' in project
    assert f'license = "{citation["license"]}"' in project
    assert f'description = "{citation["abstract"]}"' in project
    authors = ", ".join(f'{{ name = "{author["name"]}" }}' for author in citation["authors"])
    assert f"authors = [{authors}]" in project
    for reference in citation["references"]:
        assert reference.keys() >= {"type", "title", "authors"}
        assert all(
            author.keys() == {"family-names", "given-names"} for author in reference["authors"]
        )
