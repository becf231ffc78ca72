"""Inputs of a model, made from the signature of its forward function and its configuration."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zoo.special import SETTINGS
from zoo.tiny import VOCABULARY

BATCH, TOKENS, NEW = 2, 12, 7
_COMBINATIONS = 24  # the most combinations of shapes to try on one set of arguments

Inputs = dict[str, Any]


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the attributes that the configuration or one inside it has, nearest first."""
    for name in names:
        queue = deque([config])
        while queue:
            here = queue.popleft()
            value = getattr(here, name, None)
            if value is not None:
                return value
            queue.extend(v for k, v in vars(here).items() if hasattr(v, "to_dict") and not k.startswith("_"))
    return default


def _ints(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, max(high, low + 1), shape)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.5


def _ids(config: Any, length: int = TOKENS) -> torch.Tensor:
    vocabulary = find(config, "vocab_size", default=VOCABULARY)
    vocabulary = vocabulary if isinstance(vocabulary, int) else VOCABULARY
    return _ints(3, min(vocabulary, VOCABULARY - 29), BATCH, length)


def _side(config: Any) -> tuple[int, int]:
    size = find(config, "image_size", "img_size", "input_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    return (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)


def _channels(config: Any) -> int:
    return find(config, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)


def _codebooks(config: Any) -> int:
    return find(config, "num_codebooks", "num_channels", default=4)


def _frames(config: Any) -> int:
    return find(config, "num_frames", "frames_per_clip", default=4)


def _patches(config: Any) -> list[torch.Tensor]:
    """Flattened patches, as the models take them whose images have any size."""
    patch = find(config, "patch_size", default=8)
    patch = patch if isinstance(patch, int) else patch[-1]
    flat = _channels(config) * find(config, "temporal_patch_size", default=1) * patch * patch
    return [_noise(BATCH * 16, flat)]


def _pixels(config: Any) -> list[torch.Tensor]:
    height, width = _side(config)
    channels = _channels(config)
    frames = find(config, "num_frames", default=4)
    images = [_noise(BATCH, channels, height, width), _noise(BATCH, channels, 2 * height, 2 * width)]
    videos = _noise(BATCH, frames, channels, height, width)
    if find(config, "tubelet_size", "num_frames") is not None:
        return [videos, *images]
    single, pair = _noise(BATCH, 1, channels, height, width), _noise(BATCH, 2, channels, height, width)
    return [
        *images,
        single,
        pair,
        videos,
        _noise(BATCH, channels, 64, 64),
        _noise(BATCH, channels, 224, 224),
        *_patches(config),
    ]


def _audio(config: Any) -> list[torch.Tensor]:
    bins = find(config, "num_mel_bins", "feature_size", "mel_bins", default=80)
    length = find(config, "max_length", default=100)
    spectrogram = [_noise(BATCH, length if isinstance(length, int) else 100, bins)]
    wave = [_noise(BATCH, 4000) * 0.2, _noise(BATCH, 1, 4000) * 0.2]
    return spectrogram + wave if find(config, "patch_size", "fbank_size") is not None else wave + spectrogram


def _features(config: Any) -> list[torch.Tensor]:
    bins = find(
        config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_feat_size", "mel_dim",
        "input_dim", "feature_projection_input_dim", "input_size", default=80,
    )  # fmt: skip
    bins = bins if isinstance(bins, int) else 80
    positions = find(config, "max_source_positions", "n_ctx", default=64)
    size = find(config, "spec_size", default=64)
    return [
        _noise(BATCH, bins, 2 * positions), _noise(BATCH, 64, bins), _noise(BATCH, bins, 64),
        _noise(BATCH, 1, size, bins),
        _noise(BATCH, 1, 64, bins), _noise(BATCH, 64, 2 * bins), _noise(BATCH, 128, bins), _noise(BATCH, 64, 160),
    ]  # fmt: skip


def _frames_mask(config: Any) -> list[torch.Tensor]:
    """Nothing is padding, for each length of the features in :func:`_features`."""
    lengths = dict.fromkeys(max(f.shape[1:]) for f in _features(config))
    return [torch.ones(BATCH, n, dtype=torch.int64) for n in lengths]


def _embeddings(config: Any) -> list[torch.Tensor]:
    width = find(config, "hidden_size", "d_model", "embed_dim", "dim", default=32)
    return [_noise(BATCH, TOKENS, width), *_patches(config), _noise(16, width)]


def _boxes(_: Any) -> list[torch.Tensor]:
    corners = torch.sort(_ints(0, 100, BATCH, TOKENS, 2, 2), dim=2).values
    return [corners.reshape(BATCH, TOKENS, 4)]


def _grid(_: Any) -> list[torch.Tensor]:
    return [torch.tensor([[1, 4, 4]] * BATCH)]


#: What an argument of this name can be, the likeliest first.
MAKERS: dict[str, Callable[[Any], list[Any]]] = {
    "input_ids": lambda c: [_ids(c), _ids(c)[:, None].repeat(1, _codebooks(c), 1)],
    "attention_mask": lambda _: [torch.ones(BATCH, TOKENS, dtype=torch.int64)],
    "decoder_input_ids": lambda c: [
        _ids(c, NEW), _ids(c, NEW).repeat(find(c, "num_codebooks", default=4), 1),
        _ids(c, NEW)[..., None].repeat(1, 1, find(c, "num_channels", default=9)),
    ],
    "pixel_values": _pixels,
    "pixel_values_videos": lambda c: [_noise(BATCH, _frames(c), _channels(c), *_side(c))],
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "input_values": _audio,
    "input_features": _features,
    "audio_features": _features,
    "audio_values": _audio,
    "flattened_patches": lambda c: [torch.cat([_ints(0, 4, BATCH, 16, 2).float(), _noise(BATCH, 16, 768)], -1)],
    "input_features_mask": _frames_mask,
    "query_embeds": _embeddings,
    "pixel_position_ids": lambda _: [_ints(0, 4, BATCH, 16, 2)],
    "hidden_states": _embeddings,
    "inputs_embeds": _embeddings,
    "inputs": lambda c: [_ids(c), *_pixels(c)],
    "bbox": _boxes,
    "spectrogram": lambda c: [_noise(BATCH, 20, find(c, "model_in_dim", "num_mel_bins", default=80))],
    "prompt_pixel_values": _pixels,
    "decoder_input_values": lambda c: [_noise(BATCH, 6, find(c, "num_mel_bins", default=80))],
    "input_points": lambda _: [torch.rand(BATCH, 1, 2, 2) * 16],
    "context_lengths": lambda _: [torch.tensor([TOKENS] * BATCH)],
}  # fmt: skip
#: Arguments that are given where the function has them, though it can do without.
_USUAL = (
    "input_ids attention_mask pixel_values decoder_input_ids image_grid_thw input_features input_values bbox "
    "flattened_patches"
).split()
_TEXT = ("input_ids", "attention_mask", "decoder_input_ids")


def _wanted(model: Any) -> Iterator[list[str]]:
    """Sets of arguments to try."""
    parameters = inspect.signature(model.forward).parameters
    needed = [
        n for n, p in parameters.items()
        if p.default is inspect.Parameter.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]  # fmt: skip
    main = [model.main_input_name] if model.main_input_name in parameters else []
    usual = [n for n in _USUAL if n in parameters]
    if "input_ids" not in usual:
        usual = [n for n in usual if n != "attention_mask"]
    if not getattr(model.config, "is_encoder_decoder", False):
        usual = [n for n in usual if n != "decoder_input_ids"]
    yield list(dict.fromkeys([*main, *needed, *usual]))
    if "input_ids" in usual:
        yield list(dict.fromkeys([*(n for n in _TEXT if n in usual), *needed]))
    yield list(dict.fromkeys([*main, *needed]))


def _with_images(model: Any, given: Inputs) -> Inputs:
    """Puts as many image tokens into the text as the model makes of the images."""
    token = find(model.config, "image_token_id", "image_token_index")
    features = getattr(model, "get_image_features", None)
    if token is None or features is None or "pixel_values" not in given or "input_ids" not in given:
        return given
    accepted = inspect.signature(features).parameters
    with torch.no_grad():
        found = features(**{k: v for k, v in given.items() if k in accepted and k not in _TEXT})
    found = getattr(found, "pooler_output", found)
    found = torch.cat([f.reshape(-1, f.shape[-1]) for f in found]) if isinstance(found, (list, tuple)) else found
    rows = found.reshape(-1, found.shape[-1]).shape[0] // BATCH
    ids = given["input_ids"]
    ids = torch.cat([ids[:, :2], torch.full((BATCH, rows), token), ids[:, 2:]], dim=1)
    given = {**given, "input_ids": ids}
    if "attention_mask" in given:
        given["attention_mask"] = torch.ones_like(ids)
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        given["token_type_ids"] = (ids == token).long()
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == token).int()
    return given


def candidates(model: Any, model_type: str) -> Iterator[Inputs]:
    """Inputs to try, one set after another."""
    config = model.config
    special = SETTINGS.get(model_type, {}).get("inputs")
    if special is not None:
        yield special(config)
        return
    for names in _wanted(model):
        torch.manual_seed(1)
        if unknown := [n for n in names if n not in MAKERS]:
            raise NotImplementedError(f"no input {', '.join(unknown)}")
        choices = [MAKERS[n](config) for n in names]
        if "image_grid_thw" in names:
            choices[names.index("pixel_values")] = _patches(config)
        for values in itertools.islice(itertools.product(*choices), _COMBINATIONS):
            yield dict(zip(names, values, strict=True))


def inputs(model: Any, model_type: str) -> Inputs:
    """The first inputs that the model takes.

    Raises:
        RuntimeError: It takes none; the text is what it said about the first.
    """
    complaints: list[str] = []
    for given in candidates(model, model_type):
        try:
            full = _with_images(model, given)
            with torch.no_grad():
                model(**full)
            return full
        except Exception as error:
            complaints.append(f"{ {k: tuple(v.shape) for k, v in given.items()} }: {type(error).__name__}: {error}")
    raise RuntimeError(complaints[0] if complaints else "nothing to try")
