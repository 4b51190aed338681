import math

import pytest

from megarl.algorithms.kl_control import (
    AdaptiveKLController,
    FixedKLController,
    LinearKLController,
    make_kl_controller,
)


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(coef=0.2, target_kl=6.0, horizon=10000)
    controller.update(9.0, n_steps=256)  # 9/6 - 1 = 0.5 -> 0.2; 1 + 0.2*256/10000 = 1.00512
    assert controller.coef == pytest.approx(0.201024)
    controller.update(5.7, n_steps=1000)  # 5.7/6 - 1 = -0.05; 1 - 0.05*0.1 = 0.995
    assert controller.coef == pytest.approx(0.201024 * 0.995)
    controller.update(-3.0, n_steps=1000)  # -1.5 -> -0.2; 1 - 0.02 = 0.98
    assert controller.coef == pytest.approx(0.201024 * 0.995 * 0.98)


def test_adaptive_coefficient_survives_a_resume_exactly():
    run = make_kl_controller("adaptive", 0.1, 0.1, 500)
    run.update(0.13, 7)
    resumed = make_kl_controller("adaptive", 0.1, 0.1, 500)
    resumed.load_state_dict(run.state_dict())
    for controller in (run, resumed):
        controller.update(0.05, 7)
    assert resumed.coef == run.coef != 0.1


def test_fixed_controller_stays():
    controller = make_kl_controller("fixed", 0.3, 0.1, 100)
    controller.update(50.0, 10**9)
    resumed = FixedKLController(0.4)
    resumed.load_state_dict(controller.state_dict())
    assert (controller.coef, resumed.coef) == (0.3, 0.4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adaptive", 0.1, 0.0, 10), "kl_ctrl.target_kl is 0.0"),
        (("adaptive", 0.1, 0.1, -1), "kl_ctrl.horizon is -1"),
        (("linear", 0.1, 0.1, 10), "kl_ctrl.end_kl_coef is null"),
        (("stepwise", 0.1, 0.1, 10), "kl_ctrl.type='stepwise' is unknown; known: fixed, adaptive, linear"),
    ],
)
def test_bad_controller_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_kl_controller(*arguments)


def test_controller_refuses_what_would_break_the_coefficient():
    controller = make_kl_controller("adaptive", 0.1, 0.1, 100)
    with pytest.raises(ValueError, match="is nan"):
        controller.update(math.nan, 1)
    with pytest.raises(ValueError, match="horizon=100 is too short for 500 trajectories a step"):
        controller.update(0.0, 500)
    with pytest.raises(ValueError, match="holds a 'fixed' KL controller"):
        controller.load_state_dict(FixedKLController(0.1).state_dict())
    assert controller.coef == 0.1


def test_linear_controller_by_hand():
    # 0.01 to 0.1 in 4 steps: 0.01, 0.04, 0.07, 0.1, and 0.1 ever after
    controller = make_kl_controller("linear", 0.01, 0.1, 100, end_kl_coef=0.1, schedule_steps=4)
    found = []
    for _ in range(6):
        found.append(controller.coef)
        controller.update(5.0, 64)
    assert found == pytest.approx([0.01, 0.04, 0.07, 0.1, 0.1, 0.1])
    assert LinearKLController(0.2, 0.1, num_steps=1).coef == 0.2


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "linear"])
def test_an_intervention_lasts_and_survives_a_resume(kind):
    def make():
        return make_kl_controller(kind, 0.1, 0.1, 500, end_kl_coef=0.4, schedule_steps=4)

    run, untouched = make(), make()
    for controller in (run, untouched):
        controller.update(0.13, 7)
    run.scale(2.0)
    resumed = make()
    resumed.load_state_dict(run.state_dict())
    for controller in (run, resumed, untouched):
        controller.update(0.05, 7)
    assert run.coef == resumed.coef == pytest.approx(2 * untouched.coef)
