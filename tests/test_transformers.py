"""What users of Transformers and its companions write runs on tpu: Trainer, device maps, adapters, files, pipelines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

_WORDS = "the cat dog sat ran on under a mat tree and then it slept".split()


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate knows tpu by this variable only; Transformers asks ``torch.tpu`` itself, and the two must agree."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "tpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        yield


def _config(**options: Any) -> Any:
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return transformers.LlamaConfig(
        **sizes, **tokens, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, **options
    )


def _decoder() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(_config()).eval()


def _tokenizer() -> Any:
    """A tokenizer of a few whole words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *_WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def _tokens(rows: int = 4, length: int = 8) -> torch.Tensor:
    return torch.randint(3, 17, (rows, length), generator=torch.Generator().manual_seed(1))


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.device.type == "tpu"
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)


def _arguments(folder: Path, **options: Any) -> Any:
    quiet = dict(report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no")
    return transformers.TrainingArguments(output_dir=str(folder), **quiet, **options)


def test_trainer_learns_a_small_text(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in _tokens(16)]
    model = _decoder()
    arguments = _arguments(tmp_path, max_steps=8, per_device_train_batch_size=8, learning_rate=1e-2)
    assert arguments.device.type == "tpu"
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert next(model.parameters()).device.type == "tpu"
    assert trainer.evaluate()["eval_loss"] < before - 0.3


def test_trainer_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in _tokens(8)]

    def trained(folder: Path, steps: int, **options: Any) -> Any:
        # The schedule is that of four steps, whether they are made at once or in two runs.
        arguments = _arguments(folder, max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, seed=3)
        arguments.save_strategy, arguments.save_steps = "steps", 2
        trainer = transformers.Trainer(_decoder(), arguments, train_dataset=data)
        trainer.train(**options)
        assert trainer.state.global_step == steps
        return trainer.model

    whole = trained(tmp_path, 4)
    resumed = trained(tmp_path, 4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["tpu", {"": "tpu"}], ids=["name", "map"])
def test_a_device_map_loads_onto_the_device(tmp_path: Path, where: Any) -> None:
    pytest.importorskip("accelerate")
    model = _decoder()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where)
    assert {p.device.type for p in loaded.parameters()} == {"tpu"}
    _close(loaded(_tokens().to("tpu")).logits, model(_tokens()).logits)


def test_half_precision_weights_are_loaded_as_such(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _decoder().save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="tpu", dtype=torch.bfloat16)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    actual = loaded(_tokens().to("tpu")).logits.float().cpu()
    torch.testing.assert_close(actual, expected(_tokens()).logits.float(), rtol=0.05, atol=0.2)


def test_a_model_on_the_device_is_saved_as_safetensors(tmp_path: Path) -> None:
    model = _decoder().to("tpu")
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].cpu()), name


def test_safetensors_read_onto_the_device_and_write_from_it(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, 2).bfloat16()}
    files.save_file({k: v.to("tpu") for k, v in tensors.items()}, tmp_path / "x.safetensors")
    # It knows accelerators by their names, and this one's is not among them; a number is the current accelerator's.
    for device, kind in ((0, "tpu"), ("cpu", "cpu")):
        loaded = files.load_file(tmp_path / "x.safetensors", device=device)
        for name, expected in tensors.items():
            assert loaded[name].device.type == kind and torch.equal(loaded[name].cpu(), expected)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"num_beams": 2}, {"do_sample": False, "cache_implementation": "static"}],
    ids=["greedy", "beams", "static-cache"],
)
def test_generate_gives_the_cpus_tokens(options: dict[str, Any]) -> None:
    model, prompt = _decoder(), _tokens(2, 5)
    expected = model.generate(prompt, max_new_tokens=4, **options)
    # A static cache compiles on accelerators; that is torch.compile's business.
    options = options | ({"disable_compile": True} if "cache_implementation" in options else {})
    assert torch.equal(model.to("tpu").generate(prompt.to("tpu"), max_new_tokens=4, **options).cpu(), expected)


def test_sampling_stays_in_the_vocabulary() -> None:
    tokens = (
        _decoder().to("tpu").generate(_tokens(2, 5).to("tpu"), max_new_tokens=4, do_sample=True, top_k=5, top_p=0.9)
    )
    assert tokens.device.type == "tpu" and int(tokens.max()) < 32


def test_text_generation_pipeline() -> None:
    tokenizer, model = _tokenizer(), _decoder()
    make = lambda device: transformers.pipeline("text-generation", model, tokenizer=tokenizer, device=device)  # noqa: E731
    options = dict(max_new_tokens=4, do_sample=False)
    expected = make("cpu")(["the cat sat on a", "a dog"], **options)
    pipe = make("tpu")
    assert pipe.device.type == "tpu" and pipe(["the cat sat on a", "a dog"], **options) == expected


def test_text_classification_pipeline() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(_config(num_labels=3)).eval()
    texts = ["the cat sat on the mat", "a dog ran"]
    make = lambda device: transformers.pipeline(  # noqa: E731
        "text-classification", model, tokenizer=_tokenizer(), device=device, top_k=None
    )
    expected = make("cpu")(texts)
    for one, other in zip(make("tpu")(texts, batch_size=2), expected, strict=True):
        assert [x["label"] for x in one] == [x["label"] for x in other]
        assert [x["score"] for x in one] == pytest.approx([x["score"] for x in other], abs=1e-4)


def test_a_lora_adapter_trains_and_the_base_stays(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def adapted(device: str) -> Any:
        torch.manual_seed(4)
        return peft.get_peft_model(_decoder(), config).to(device)

    gradients = {}
    for device in ("cpu", "tpu"):
        model = adapted(device)
        ids = _tokens().to(device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        first = model(input_ids=ids, labels=ids).loss
        first.backward()
        gradients[device] = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        assert model(input_ids=ids, labels=ids).loss.item() < first.item()
    assert gradients["tpu"].keys() == gradients["cpu"].keys() and all("lora" in n for n in gradients["tpu"])
    for name, expected in gradients["cpu"].items():
        torch.testing.assert_close(gradients["tpu"][name], expected, rtol=1e-3, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(_decoder().to("tpu"), tmp_path)
    _close(again(ids).logits, model.cpu()(ids.cpu()).logits)
    merged = again.merge_and_unload()
    _close(merged(ids).logits, model(ids.cpu()).logits)


def test_accelerate_prepares_a_training_loop(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the Trainer above
    accelerator = accelerate.Accelerator(project_dir=str(tmp_path), gradient_accumulation_steps=2)
    assert accelerator.device.type == "tpu"
    model = _decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(_tokens(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for ids in loader:
            assert ids.device.type == "tpu"
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    assert losses[-1] < losses[0]
    accelerator.save_state(str(tmp_path / "state"))
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        next(model.parameters()).zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())


def test_accelerate_dispatches_the_layers_of_a_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = _decoder()
    expected = model(_tokens()).logits
    spread = accelerate.dispatch_model(model, {"model.embed_tokens": "tpu", "model": "tpu", "lm_head": "tpu"})
    _close(spread(_tokens().to("tpu")).logits, expected)
