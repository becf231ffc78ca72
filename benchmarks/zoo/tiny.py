"""Transformers' configurations made small: hidden size 32, two layers, four heads, a short vocabulary."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from zoo.special import SETTINGS

HIDDEN, HEADS, HEAD_DIM, LAYERS, VOCABULARY, IMAGE = 32, 4, 8, 2, 128, 32


class Scale(NamedTuple):
    """How widths become small: to a fixed size, or divided, with or without the number of heads.

    Fixed sizes fit most architectures. Those whose widths depend on one another keep their proportions, and those that
    expect a certain width of a head get fewer heads.
    """

    fixed: bool = True
    widths: int = 1
    heads: int = 1


SCALES = (Scale(), Scale(False, 16, 16), Scale(False, 8, 1), Scale(False, 1, 1))

Rule = Callable[[int, Scale], int]


def _to(size: int) -> Rule:
    return lambda value, _: min(value, size)


def _width(size: int) -> Rule:
    return lambda value, scale: min(value, size) if scale.fixed else max(math.ceil(value / scale.widths), min(value, 4))


def _head_width(size: int) -> Rule:
    def small(value: int, scale: Scale) -> int:
        if scale.fixed:
            return min(value, size)
        return value if scale.heads > 1 else max(math.ceil(value / scale.widths), min(value, 4))

    return small


def _heads(value: int, scale: Scale) -> int:
    return min(value, HEADS) if scale.fixed else max(1, value // scale.heads)


def _kv_heads(value: int, scale: Scale) -> int:
    if scale.fixed:
        return min(value, HEADS if value >= 32 else 2)
    return max(1, value // scale.heads)


def _keep(value: int, _: Scale) -> int:
    return value


#: Names of attributes, with or without something and an underscore before them, and what becomes of an int under that
#: name. The first that matches counts.
RULES: list[tuple[str, Rule]] = [
    ("type_vocab_size num_labels num_channels in_channels in_chans spatial_merge_size temporal_patch_size", _keep),
    ("num_kv_shared_layers num_nextn_predict_layers", _to(0)),
    ("num_conv.*layers num_feat.*layers num_hash.*layers num_stages.*", _keep),
    (".*vocab_size(_per_layer_input)? vocabulary_size n_vocab codebook_size", _to(VOCABULARY)),
    ("hidden_size_per_layer_input rank q_rank kv_rank", _width(16)),
    ("qk_head_dim", _head_width(2 * HEAD_DIM)),
    ("d_state state_size state_dim", _width(8)),
    ("head_dim head_size d_kv d_head key_dim kv_channels attention_head_size", _head_width(HEAD_DIM)),
    ("index_topk index_n_heads", _to(4)),
    ("mamba_(n_heads|num_heads) chunk_size.* chunk_length", _to(8)),
    ("intermediate_(size|dim) ffn_dim ffn_hidden_size n_inner mlp_dim d_ff feedforward_dim ff_dim", _width(64)),
    ("dim_feedforward mlp_hidden_size", _width(64)),
    ("num_key_value_heads num_kv_heads n_head_kv n_kv_heads multi_query_group_num", _kv_heads),
    ("num_heads n_heads? attention_heads num_.*_heads attn_heads", _heads),
    ("num_.*layers num_layers? n_layers? num_blocks (en|de)coder_layers predictor_layers depth layers", _to(LAYERS)),
    ("first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts n_group topk_group", _to(1)),
    ("num_experts num_local_experts n_routed_experts n_experts num_routed_experts", _to(4)),
    ("num_experts_per_tok(en)? top_k topk moe_k num_selected_experts (attn|expert)_layer_period", _to(2)),
    ("attn_layer_offset expert_layer_offset", _to(1)),
    (".*sliding_window.* attention_window local_attention window attention_chunk_size block_length", _to(8)),
    ("n_groups num_groups", _to(2)),
    (
        "max_position_embeddings n_positions max_(source|target)_positions max_sequence_length n_ctx max_seq_len",
        _to(128),
    ),
    ("max_2d_position_embeddings seq_length max_seq_length max_length", _to(128)),
    ("num_queries num_query_tokens num_object_queries num_latents n_latents num_denoising num_proposals", _to(10)),
    (".*hidden_size hidden_dim d_model n_embd embed_dim embedding_(size|dim) dim width", _width(HIDDEN)),
    ("out_hidden_size output_dim channels num_.*filters embed_size", _width(HIDDEN)),
]
_COMPILED = [(re.compile("(.*_)?(" + "|".join(names.split()) + ")"), rule) for names, rule in RULES]

_TOKEN = re.compile(r".*(_token_id|_token_index|_token|(bos|eos|pad|sep|cls|mask|unk|start|end|blank)_id|_idx)")
_LAYER_LISTS = re.compile(r".*(layers_block_type|layers_type|layer_type|_pattern|attn_config_list|_types)")
_KNOWN_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, sep_token_id=2)


def _number(name: str, value: int, scale: Scale) -> int:
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(name):
            return rule(value, scale)
    return value


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


class Shrinker:
    """Makes one configuration small, in place.

    Args:
        scale: What becomes of widths and heads.
    """

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._next_token = VOCABULARY - 28

    def shrink(self, config: Any) -> Any:
        """Shrinks the configuration and those in it."""
        kinds = self._layer_kinds(config)
        for name, value in list(vars(config).items()):
            if name.startswith("_") or name in ("id2label", "label2id", "model_type", "transformers_version"):
                continue
            if _is_config(value):
                self.shrink(value)
                continue
            small = self._value(name, value, kinds)
            if small is not value:
                # Some attributes are read-only or checked against others that are not small yet.
                with contextlib.suppress(Exception):
                    setattr(config, name, small)
        if kinds:
            with contextlib.suppress(Exception):
                config.num_hidden_layers = len(kinds)
        return config

    def _layer_kinds(self, config: Any) -> list[int]:
        """The layers to keep where a list names their kinds: the first of each kind, two at least, four at most."""
        for name, value in vars(config).items():
            if _LAYER_LISTS.fullmatch(name) and isinstance(value, (list, tuple)) and len(value) > LAYERS:
                firsts = sorted({str(kind): i for i, kind in reversed(list(enumerate(value)))}.values())[:4]
                rest = [i for i in range(len(value)) if i not in firsts]
                return sorted(firsts + rest[: max(0, LAYERS - len(firsts))])
        return []

    def _value(self, name: str, value: Any, kinds: list[int]) -> Any:
        if isinstance(value, bool):
            return False if name == "apply_spec_augment" else value
        if isinstance(value, int):
            return self._token(name, value) if _TOKEN.fullmatch(name) else self._int(name, value)
        if isinstance(value, float):
            quiet = "drop" in name or name.startswith(("mask_time_prob", "mask_feature_prob")) or "jitter" in name
            return 0.0 if quiet else value
        if isinstance(value, (list, tuple)) and value:
            return type(value)(self._list(name, list(value), kinds))
        if isinstance(value, dict):
            return self._dict(name, value)
        return value

    def _int(self, name: str, value: int) -> int:
        if name.endswith("image_size") or name in ("img_size", "input_size"):
            return min(value, IMAGE)
        if name == "patch_size":
            return 8 if value >= 8 else value
        return _number(name, value, self._scale)

    def _token(self, name: str, value: int) -> int:
        """A token's number within the vocabulary; special tokens get numbers of their own at its end."""
        if name in _KNOWN_TOKENS:
            return _KNOWN_TOKENS[name]
        if value < VOCABULARY - 30:
            return value
        self._next_token += 1
        return min(self._next_token, VOCABULARY - 1)

    def _list(self, name: str, value: list[Any], kinds: list[int]) -> list[Any]:
        per_layer = isinstance(value[0], (str, bool, float)) or _LAYER_LISTS.fullmatch(name)
        if kinds and per_layer and len(value) > max(kinds):
            return [value[i] for i in kinds]
        if all(isinstance(v, list) for v in value):
            return [self._list(name, v, kinds) for v in value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return value
        if _TOKEN.fullmatch(name):
            return [2 if "eos" in name else self._token(name, v) for v in value]
        if name.endswith("image_size"):
            return [min(v, IMAGE) for v in value]
        if name in ("depths", "layer_depths", "num_blocks", "encoder_num_layers"):
            return [min(v, 1) if len(value) > 2 else min(v, LAYERS) for v in value]
        if "section" in name and self._scale.fixed:
            return self._sections(value)
        if name == "conv_dim" or (len(set(value)) == 1 and value[0] >= 64):
            return [min(v, HIDDEN) for v in value]
        if re.search(r"ind(ex|ic)|feature_layer|(cross_attention|global_attn|out)_layers$", name):
            return [v for v in value if v < LAYERS] or value[:1]
        if re.search(r"(heads|groups)$", name) and self._scale.fixed and max(value) < 64:
            return [min(v, 2) for v in value]
        if re.search(r"hidden_size|dims?$|width|embed|filters", name) and max(value) >= 64:
            divisor = max(1, max(value) // 64) if self._scale.fixed else self._scale.widths
            return [max(8, v // divisor // 8 * 8) if v >= 16 else v for v in value]
        return value

    def _dict(self, name: str, value: dict[Any, Any]) -> dict[Any, Any]:
        if not name.startswith("rope"):
            return value
        small = {k: self._dict(name, v) if isinstance(v, dict) else v for k, v in value.items()}
        if "mrope_section" in small:
            small["mrope_section"] = self._sections(small["mrope_section"])
        for key in ("long_factor", "short_factor"):
            if key in small and self._scale.fixed:
                small[key] = small[key][: HEAD_DIM // 2]
        return small

    def _sections(self, value: list[int]) -> list[int]:
        return _section(value, HEAD_DIM // 2) if self._scale.fixed else value


def _section(value: list[int], total: int) -> list[int]:
    """Splits ``total`` as ``value`` splits its sum, nothing below one."""
    if sum(value) <= total:
        return value
    small = [max(1, v * total // sum(value)) for v in value]
    small[0] += total - sum(small)
    return small


def _assign(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    setattr(config, name, value)


def default(model_type: str) -> Any:
    """The architecture's configuration as its authors left it, with what it cannot do without."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    settings = SETTINGS.get(model_type, {})
    return settings["build"](CONFIG_MAPPING) if "build" in settings else kind()


def configuration(model_type: str, scale: Scale = SCALES[0]) -> Any:
    """A small configuration of the architecture."""
    settings = SETTINGS.get(model_type, {})
    config = Shrinker(scale).shrink(default(model_type))
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    for path, value in settings.get("set", {}).items():
        _assign(config, path, value(config) if callable(value) else value)
    return config
