"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import python
from torch_tpu import config

ROOT = Path(__file__).parent.parent
PAGES = ("architecture", "compile", "dynamic-shapes", "operators")
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in PAGES)]


def variables_table() -> list[str]:
    """The rows of README.md's table of environment variables."""

    def shown(default: object) -> str:
        return {True: "1", False: "0", "": "not set"}[default] if isinstance(default, bool | str) else str(default)

    return [f"| `{v.name}` | {shown(v.default)} | {v.help} |" for v in config.VARIABLES.values()]


def test_the_table_of_environment_variables_is_config_variables() -> None:
    """Print the table anew with ``python -m tests.test_docs``."""
    text = (ROOT / "README.md").read_text()
    table = text.split("<!-- variables", 1)[1].split("<!-- end of variables -->")[0]
    assert [row for row in table.splitlines() if row.startswith("| `")] == variables_table()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`([\w./]+\.(?:py|cc|h|md|toml))`", text) + re.findall(r"\]\(([\w./-]+\.md)\)", text)
    assert named
    folders = ("docs", "examples", "tests", "torch_tpu")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert not [name for name in named if not (ROOT / name).exists() and not any(p.endswith(f"/{name}") for p in there)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_folder_of_a_machine(document: Path) -> None:
    assert not re.findall(r"(?:/work|/root|/home|/tmp|/opt)/[\w/]+", document.read_text())


def _blocks(page: str) -> str:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 3
    return "\n".join(blocks)


@pytest.mark.parametrize("page", ["operators", "compile", "dynamic-shapes"])
def test_the_page_runs(page: str) -> None:
    """All of its Python blocks, in order, as one program."""
    python(_blocks(page))


def test_the_page_on_sizes_that_change_says_what_is_compiled() -> None:
    done = python(_blocks("dynamic-shapes"))
    lines = [re.sub(r"s\d+", "s77", line) for line in done.stdout.splitlines()]
    assert [line.partition(" | ")[2] for line in lines[:3]] == [
        "first call of the function",
        "bound of s77: 8 is new",
        "bound of s77: 8 became 32",
    ]
    assert "compiled for each size: aten.sort.default over a size that changes" in done.stderr
    assert "aten.sort.default over a size that changes" in (ROOT / "docs" / "dynamic-shapes.md").read_text()


def test_the_page_on_compile_has_all_options() -> None:
    from torch_tpu.compile.settings import known

    text = (ROOT / "docs" / "compile.md").read_text()
    assert not [name for name in known() if f"`{name}`" not in text]


if __name__ == "__main__":
    print("\n".join(variables_table()))
