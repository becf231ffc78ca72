"""A few models of timm and Diffusers."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch


class _Constants(type):
    """Classes that have whatever constant is asked of them."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Anything(types.ModuleType):
    """A module with whatever class is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Constants(name, (torch.nn.Module,), {})


def import_timm() -> Any:
    """timm without torchvision, of which its models need no part, and which does not always exist for a PyTorch."""
    names = [
        "torchvision" + end for end in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")
    ]
    missing = [name for name in names if "torchvision" not in sys.modules]
    sys.modules.update((name, _Anything(name)) for name in missing)
    try:
        import timm

        return timm
    finally:
        for name in missing:
            del sys.modules[name]


class Pipeline(torch.nn.Module):
    """A pipeline of Diffusers from embeddings of a prompt to an image, two steps of it."""

    def __init__(self, pipe: Any, denoiser: str) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict({k: v for k, v in pipe.components.items() if isinstance(v, torch.nn.Module)})
        self._pipe, self._denoiser = [pipe], denoiser  # in a list: it is no module, and copies of this keep it

    def compiled(self) -> Pipeline:
        """This one with its denoiser compiled, as its users do."""
        self.parts[self._denoiser] = torch.compile(self.parts[self._denoiser])
        return self

    def forward(self, **options: Any) -> torch.Tensor:
        pipe = self._pipe[0]
        for name, part in self.parts.items():
            setattr(pipe, name, part)
        pipe.set_progress_bar_config(disable=True)
        return pipe(**options, num_inference_steps=2, output_type="pt").images


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
        scaling_factor=0.2,
        shift_factor=0.1,
    )


def _unet_inputs() -> dict[str, Any]:
    return {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(2, 6, 32),
    }


def _flux_inputs() -> dict[str, Any]:
    places = torch.zeros(16, 3)
    places[:, 1], places[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": places,
        "txt_ids": torch.zeros(6, 3),
        "guidance": torch.tensor([3.5, 3.5]),
    }


def _stable_diffusion() -> tuple[Any, dict[str, Any]]:
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    nothing = dict(text_encoder=None, tokenizer=None, safety_checker=None, feature_extractor=None)
    pipe = StableDiffusionPipeline(
        vae=_vae(), unet=_unet(), scheduler=DDIMScheduler(), requires_safety_checker=False, **nothing
    )
    prompt = {"prompt_embeds": torch.randn(1, 6, 32), "negative_prompt_embeds": torch.randn(1, 6, 32)}
    return Pipeline(pipe, "unet"), {**prompt, "latents": torch.randn(1, 4, 8, 8)}


def _flux_pipeline() -> tuple[Any, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    nothing = dict(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), vae=_vae(), transformer=_flux(), **nothing)
    prompt = {"prompt_embeds": torch.randn(1, 6, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
    return Pipeline(pipe, "transformer"), {**prompt, "latents": torch.randn(1, 16, 16), "height": 16, "width": 16}


_DIFFUSERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "UNet2DConditionModel": lambda: (_unet(), _unet_inputs()),
    "FluxTransformer2DModel": lambda: (_flux(), _flux_inputs()),
    "AutoencoderKL": lambda: (_vae(), {"sample": torch.randn(2, 3, 16, 16)}),
    "StableDiffusionPipeline": _stable_diffusion,
    "FluxPipeline": _flux_pipeline,
}
_TIMM = "test_resnet test_vit test_vit2 test_convnext test_efficientnet test_byobnet test_nfnet test_mambaout".split()

#: Library and name of each model.
MODELS = [*(("timm", name) for name in _TIMM), *(("diffusers", name) for name in _DIFFUSERS)]


def build(library: str, name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model of that name with random weights, and inputs."""
    torch.manual_seed(0)
    if library == "diffusers":
        return _DIFFUSERS[name]()
    model = import_timm().create_model(name, pretrained=False, num_classes=10)
    return model, {"x": torch.randn(2, 3, 64, 64)}
