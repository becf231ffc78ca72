"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import python
from torch_tpu import config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "operators.md"]


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
    named = re.findall(r"`([\w./]+\.(?:py|cc|h|md|toml))`", text) + re.findall(r"\]\(([\w./]+\.md)\)", text)
    assert named
    folders = ("docs", "examples", "tests", "torch_tpu")
    there = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert not [name for name in named if not (ROOT / name).exists() and not any(p.endswith(f"/{name}") for p in there)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_folder_of_a_machine(document: Path) -> None:
    assert not re.findall(r"(?:/work|/root|/home|/tmp|/opt)/[\w/]+", document.read_text())


def test_the_page_on_operators_runs() -> None:
    """All of its Python blocks, in order, as one program."""
    text = (ROOT / "docs" / "operators.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 4
    python("\n".join(blocks))


if __name__ == "__main__":
    print("\n".join(variables_table()))
