"""What the engine's tables hold, as the plain data that is told of them."""

import msgspec

from specserve.exchange.messages import CostState, GuessKind, PlanState, RowCost
from specserve.scheduling.cost import Step, StepCosts
from specserve.scheduling.planner import Plan
from specserve_drafters.calibration import Calibration


def cost_state(costs: StepCosts) -> CostState:
    steps = [RowCost(rows, s, costs.is_known(rows)) for rows, s in costs.table().items()]
    per_token, per_row, per_request = costs.added
    return CostState(steps, per_token, per_row, per_request, costs.slowdown)


def calibration_state(calibration: Calibration) -> dict[str, list[GuessKind]]:
    return msgspec.convert(calibration.table(), dict[str, list[GuessKind]])


def plan_state(plan: Plan, step: Step) -> PlanState:
    return PlanState(
        roots=step.num_roots,
        prompt_rows=step.prompt_rows,
        guesses=plan.rows - step.rows,
        rows=plan.rows,
        tokens=plan.tokens,
        seconds=plan.seconds,
    )
