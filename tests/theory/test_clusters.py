import numpy as np
import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.theory.clusters import Dynamics, Head, euler, integrate, leaders, log_defect, uniform_tokens
from reference.token_flow import velocity

I1 = [[1.0]]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_matrices(d, seed, count=3):
    return torch.randn(count, d, d, generator=generator(seed), dtype=torch.float64).numpy()


def test_velocity_agrees_with_its_loops_over_two_heads():
    x = uniform_tokens(7, 3, generator=generator())
    heads = [random_matrices(3, seed) for seed in (1, 2)]
    dynamics = Dynamics(tuple(Head(*head) for head in heads))
    np.testing.assert_allclose(dynamics.velocity(0.0, x, rescaled=False), velocity(x, heads), rtol=1e-12, atol=1e-12)


def test_rescaled_form_has_the_same_P_and_tokens():
    Q, K, V = random_matrices(3, 3)
    x0 = uniform_tokens(6, 3, generator=generator())
    plain = integrate(Dynamics.single(Q, K, V), x0, times=[0, 0.5, 1.5], rescaled=False)
    rescaled = integrate(Dynamics.single(Q, K, V), x0, times=[0, 0.5, 1.5])
    from scipy.linalg import expm

    for i, t in enumerate(plain.times):
        np.testing.assert_allclose(rescaled.P(i), plain.P(i), atol=1e-7)
        np.testing.assert_allclose(rescaled.tokens[i] @ expm(t * V).T, plain.tokens[i], rtol=1e-6, atol=1e-7)


def test_euler_steps_come_to_the_solver_at_first_order():
    x0 = uniform_tokens(8, 2, generator=generator())
    dynamics = Dynamics.single(np.eye(2), np.eye(2), np.eye(2))
    exact = integrate(dynamics, x0, times=[1.0], rescaled=False).tokens[0]
    errors = [np.abs(euler(dynamics, x0, step=h, times=[1.0]).tokens[0] - exact).max() for h in (0.02, 0.01, 0.005)]
    ratios = np.divide(errors[:-1], errors[1:])
    assert (np.abs(ratios - 2) < 0.1).all()


def test_schedule_of_zero_value_stops_the_tokens():
    x0 = uniform_tokens(5, 1, generator=generator())
    fading = Head(np.eye(1), np.eye(1), lambda t: np.eye(1) if t < 1 else np.zeros((1, 1)))
    run = integrate(Dynamics((fading,)), x0, times=[0, 1, 2, 5], rescaled=False)
    assert np.abs(run.tokens[1] - run.tokens[0]).max() > 0.1
    np.testing.assert_allclose(run.tokens[3], run.tokens[2], atol=1e-6)


def test_attention_acts_so_the_flow_is_not_that_of_V_alone():
    x0 = uniform_tokens(10, 1, generator=generator())
    run = integrate(Dynamics.single(I1, I1, I1), x0, times=[0, 2], rescaled=False)
    assert np.abs(run.tokens[1] - np.exp(2) * x0).max() > 1


def test_scores_of_late_times_do_not_overflow():
    dynamics = Dynamics.single(I1, I1, I1)
    tokens = np.array([[-1.0], [0.5], [1.0]])
    logits = dynamics.logits(1000.0, tokens, rescaled=True)
    assert not np.isnan(logits).any()
    assert logits.argmax(axis=1).tolist() == [0, 2, 2]
    run = integrate(dynamics, tokens, times=[0, 800], rtol=1e-6)
    assert np.isfinite(run.tokens).all()


def test_tokens_that_leave_the_range_are_an_error_with_the_cure():
    with pytest.raises(RankscopeError, match=r"left float64's range.*rescaled=True"):
        integrate(Dynamics.single(I1, I1, I1), [[1.0], [-1.0]], times=[0, 800], rescaled=False)


def test_two_tokens_of_one_first_coordinate_stay_two():
    # For x = (1, ±b), ḃ = b tanh(b²) in rescaled terms: two points remain and P tends to the identity.
    dynamics = Dynamics.single(np.eye(2), np.eye(2), np.eye(2))
    run = integrate(dynamics, [[1.0, 0.5], [1.0, -0.5]], times=[0, 1e-4, 12])
    growth = np.exp(1e-4) * run.tokens[1][0, 1] - 0.5
    assert growth / 1e-4 == pytest.approx(0.5 * np.tanh(0.25), rel=1e-3)
    np.testing.assert_allclose(run.P(-1), np.eye(2), atol=1e-6)
    assert run.tokens[-1][0, 1] == pytest.approx(-run.tokens[-1][1, 1], rel=1e-6)
    assert run.tokens[-1][0, 1] > 0.05


def test_defect_is_known_where_it_underflows():
    assert log_defect(np.array([[0.0, -2000.0, -2000.0]]))[0] == pytest.approx(-2000 + np.log(2))
    assert leaders(np.array([[0.5, 0.5], [0.2, 0.8]])).tolist() == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"times": [1, 0]}, "`times` must rise"),
        ({"times": [-1, 1]}, "`times` must rise"),
        ({"x0": [1.0, 2.0]}, r"`x0` must be finite tokens of shape \(n, d\)"),
        ({"x0": [[np.nan]]}, "`x0` must be finite"),
        ({"x0": [[1.0, 2.0]]}, "give matrices of the tokens' width"),
        ({"dynamics": Dynamics(2 * Dynamics.single(I1, I1, I1).heads)}, "rescaled=False"),
    ],
)
def test_mistakes_are_refused(change, words):
    call = {"dynamics": Dynamics.single(I1, I1, I1), "x0": [[1.0], [2.0]], "times": [0, 1], **change}
    with pytest.raises(RankscopeError, match=words):
        integrate(call.pop("dynamics"), call.pop("x0"), **call)


def test_euler_refuses_times_between_steps():
    with pytest.raises(RankscopeError, match="whole numbers of steps"):
        euler(Dynamics.single(I1, I1, I1), [[1.0]], step=0.3, times=[1.0])
