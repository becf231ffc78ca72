"""What there is to sweep: an entry per architecture and class."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import NamedTuple

#: Transformers' mappings from architecture to class, in the order of the sweep.
FAMILIES = (
    "MODEL CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_TEXT_TO_TEXT CTC MASKED_LM OBJECT_DETECTION "
    "UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION DEPTH_ESTIMATION TEXT_TO_WAVEFORM TIME_SERIES_PREDICTION"
).split()
#: The families whose models write text.
WRITERS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")


class Entry(NamedTuple):
    """One model to run."""

    library: str
    architecture: str
    cls: str
    writes: bool

    @property
    def name(self) -> str:
        return f"{self.architecture}/{self.cls}"


_SKIPPED = ("CONFIG_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES")


def _mappings() -> dict[str, dict[str, str]]:
    from transformers.models.auto import modeling_auto

    found = {}
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES") and name not in _SKIPPED:
            family = name.removesuffix("_MAPPING_NAMES").removeprefix("MODEL_FOR_")
            found[family] = {
                key: value if isinstance(value, str) else value[0]
                for key, value in getattr(modeling_auto, name).items()
            }
    return found


def _transformers() -> list[Entry]:
    """Each class of the families above, and for architectures in none of them the first class of any other."""
    mappings = _mappings()
    entries: dict[tuple[str, str], Entry] = {}
    architectures: set[str] = set()
    for family in [*FAMILIES, *(name for name in mappings if name not in FAMILIES)]:
        for architecture, cls in mappings[family].items():
            if family in FAMILIES or architecture not in architectures:
                entry = Entry("transformers", architecture, cls, family in WRITERS)
                known = entries.setdefault((architecture, cls), entry)
                if entry.writes and not known.writes:
                    entries[architecture, cls] = entry
        architectures.update(mappings[family])
    return list(entries.values())


def _others() -> list[Entry]:
    from zoo.others import MODELS

    return [Entry(library, library, name, False) for library, name in MODELS]


def entries(patterns: list[str]) -> list[Entry]:
    """The entries whose architecture, class or full name one of the patterns matches; all without patterns."""
    found = [*_transformers(), *_others()]
    if not patterns:
        return found
    return [
        e
        for e in found
        if any(fnmatch(text, p) for p in patterns for text in (e.architecture, e.cls, e.name, e.library))
    ]
