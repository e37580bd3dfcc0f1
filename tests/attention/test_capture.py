"""What capture leaves behind: nothing, however it ends; and what it keeps alive: one layer."""

import threading
import weakref

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rankscope._errors import RankscopeError
from rankscope.attention import route as route_module
from rankscope.attention._modules import configurations
from rankscope.attention.interface import AttentionCall, capture, find_route, run_captured
from zoo import MODELS, tiny_inputs, tiny_model


def fingerprint(model: torch.nn.Module) -> tuple[object, ...]:
    """All that capture touches: the process's registrations, the configurations, training flags and hooks."""
    return (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        [config._attn_implementation for config in configurations(model)],
        [module.training for module in model.modules()],
        [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
    )


def half_trained(name: str) -> torch.nn.Module:
    """A model in train mode, but for one part that its user has put in eval mode."""
    model = tiny_model(name).train()
    next(model.children()).eval()
    return model


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mpnet", "xlnet"])
def test_nothing_is_left_after_a_run(name: str) -> None:
    model, inputs = half_trained(name), tiny_inputs(name)
    with torch.no_grad():  # transformers adds its own hooks for good when attentions are first asked for
        model(**inputs, output_attentions=MODELS[name].reached == "fallback")
    before = fingerprint(model)
    run_captured(model, inputs, lambda call: None)
    assert fingerprint(model) == before
    assert "eager" not in AttentionInterface._global_mapping, "transformers itself registers none"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["bert", "t5", "mpnet"])
def test_nothing_is_left_after_an_exception_in_the_sink(name: str, error: type[BaseException]) -> None:
    model, inputs = half_trained(name), tiny_inputs(name)
    with torch.no_grad():
        model(**inputs, output_attentions=MODELS[name].reached == "fallback")
    before = fingerprint(model)
    found = find_route(model, inputs)

    def stop(call: AttentionCall) -> None:
        assert fingerprint(model) != before
        raise error("stop")

    with pytest.raises(error):
        run_captured(model, inputs, stop, route=found)
    assert fingerprint(model) == before
    run_captured(model, inputs, lambda call: None, route=found)  # the lock is free again


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception_in_the_forward(error: type[BaseException]) -> None:
    model, inputs = half_trained("gpt2"), tiny_inputs("gpt2")

    def fail(*_: object) -> None:
        raise error("forward")

    handle = model.h[1].mlp.register_forward_pre_hook(fail)
    before = fingerprint(model)
    for run in (find_route, lambda m, i: run_captured(m, i, lambda call: None)):
        with pytest.raises(error):
            run(model, inputs)
        assert fingerprint(model) == before
    handle.remove()
    find_route(model, inputs)


def test_a_user_s_own_eager_is_put_back_and_used() -> None:
    used = []

    def own(module, query, key, value, attention_mask, **kwargs):  # type: ignore[no-untyped-def]
        used.append(type(module).__name__)
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("eager", own)
    try:
        with capture(tiny_model("bert"), lambda call: None) as session, torch.no_grad():
            tiny_model("gpt2", attention="eager")(**tiny_inputs("gpt2"))
        assert session.total == 0
        assert used == ["GPT2Attention"] * 2
        assert AttentionInterface._global_mapping["eager"] is own
    finally:
        del AttentionInterface._global_mapping["eager"]


def test_modules_of_other_models_pass_through_unseen() -> None:
    other, inputs = tiny_model("llama", attention="eager"), tiny_inputs("llama", padding="right")
    with torch.no_grad():
        expected = other(**inputs).last_hidden_state
        with capture(tiny_model("bert"), lambda call: None) as session:
            assert torch.equal(other(**inputs).last_hidden_state, expected)
    assert session.total == 0


def test_the_output_is_the_model_s_own() -> None:
    for name in ("bert", "llama", "t5", "mpnet"):
        model, inputs = tiny_model(name), tiny_inputs(name, padding="right")
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
        outputs = run_captured(model, inputs, lambda call: None)
        # Rows of padding are free: sdpa and eager treat rows that may look nowhere differently.
        torch.testing.assert_close(outputs.last_hidden_state[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_thread", [False, True], ids=["nested", "concurrent"])
def test_a_second_capture_is_refused(in_thread: bool) -> None:
    outcome: list[BaseException] = []

    def second() -> None:
        try:
            with capture(tiny_model("gpt2"), lambda call: None):
                pass
        except RankscopeError as error:
            outcome.append(error)

    with capture(tiny_model("bert"), lambda call: None):
        if in_thread:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        else:
            second()
    assert "another capture is running" in str(outcome[0])


def test_threads_that_capture_in_turn_do_not_meet() -> None:
    errors: list[BaseException] = []

    def work(name: str) -> None:
        model, inputs = tiny_model(name), tiny_inputs(name)
        for _ in range(10):
            try:
                run_captured(model, inputs, lambda call: None)
            except RankscopeError as error:
                if "another capture" not in str(error):
                    errors.append(error)

    before = dict(AttentionInterface._global_mapping)
    threads = [threading.Thread(target=work, args=(name,)) for name in ("bert", "gpt2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert before == AttentionInterface._global_mapping


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mpnet", "bloom", "gpt_neo", "deberta_v2"])
def test_no_more_than_one_layer_is_alive(name: str) -> None:
    """Reported as Qwen3-VL 1464 and inseq 279: attentions of all layers at once fill the memory."""
    model, inputs = tiny_model(name), tiny_inputs(name)
    found = find_route(model, inputs)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watch(call: AttentionCall) -> None:
        nonlocal most
        alive[:] = [reference for reference in alive if reference() is not None]
        tensor = call.query if call.weights is None else call.weights
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))

    outputs = run_captured(model, inputs, watch, route=found)
    assert most == 1
    assert not [reference for reference in alive if reference() is not None]
    assert outputs.last_hidden_state is not None


def test_a_hybrid_model_is_measured_where_it_has_maps_and_says_where_it_has_none() -> None:
    from torch import nn

    class PoolingAttention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = tiny_model("bert")
    model.encoder.layer[1].output.dropout = PoolingAttention()
    found = find_route(model, tiny_inputs("bert"))
    assert found.reached == "routed"
    by_path = {item.module: item for item in found.modules}
    assert by_path["encoder.layer.1.output.dropout"].reached == "refused"
    assert "never calls the attention interface" in by_path["encoder.layer.1.output.dropout"].reason
    assert by_path["encoder.layer.1.attention.self"].reached == "routed"


def test_later_forwards_cost_one_pass() -> None:
    for name in ("bert", "mpnet"):
        model, inputs = tiny_model(name), tiny_inputs(name)
        found = find_route(model, inputs)
        passes = []
        model.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        run_captured(model, inputs, lambda call: None, route=found)
        assert len(passes) == 1


def test_a_route_of_another_model_is_refused() -> None:
    routed = find_route(tiny_model("bert"), tiny_inputs("bert"))
    with pytest.raises(RankscopeError, match="never called the attention interface"):
        run_captured(tiny_model("mpnet"), tiny_inputs("mpnet"), lambda call: None, route=routed)


def test_the_forward_runs_without_cache_and_gradients() -> None:
    outputs = run_captured(tiny_model("llama"), tiny_inputs("llama"), lambda call: None)
    assert outputs.past_key_values is None
    assert not outputs.last_hidden_state.requires_grad
    assert route_module.run_forward(tiny_model("gpt2"), tiny_inputs("gpt2")).past_key_values is None
