"""Chooses the sources to ask for each request of a step."""

from collections.abc import Collection, Sequence
from math import ceil, log
from time import perf_counter

from specserve.speculation.accounts import SourceAccount
from specserve.speculation.constants import FEW
from specserve.speculation.costs import StepCosts
from specserve.speculation.request_draft import AskedSource, RequestDraft
from specserve.speculation.steps import Step
from specserve_drafters.base import DraftSource
from specserve_drafters.candidates import MAX_NODES


class SourceChooser:
    """Asks sources that promise to save time, or that have saved time, and others as trials."""

    def __init__(self, estimating_names: Collection[str]) -> None:
        self.estimating_names = estimating_names
        self.part = 0.0  # seconds that an accepted draft token saves, expected
        self.row_share = 0.0  # time of a row, relative to that

    def weigh_tokens(self, costs: StepCosts, step: Step) -> None:
        """Set what an accepted draft token of this step saves, and what its row takes."""
        none, *some = costs.of_each(step, (0, *FEW))
        roots = costs.of(step.without_prompts) if step.prompt_rows else none
        self.part, rows = roots / max(step.num_roots, 1), zip(some, FEW, strict=True)
        self.row_share = min([(seconds - none) / size for seconds, size in rows]) / self.part

    def estimate(self, roots: Sequence[RequestDraft], is_always: bool) -> None:
        """Let each source whose estimates are due estimate its requests together."""
        by_source = dict[DraftSource, list[tuple[RequestDraft, str, SourceAccount]]]()
        for root in roots:
            root.estimates = {}
            for source, name, account in root.sources:
                if name in self.estimating_names and (account.is_due or is_always):
                    by_source.setdefault(source, []).append((root, name, account))
        start = perf_counter()
        for source, asked in by_source.items():
            texts = [(root.request.id, root.request.token_ids) for root, _, _ in asked]
            found = source.expected_of_each(texts)
            each = (-start + (start := perf_counter())) / len(asked)
            for (root, name, account), expected in zip(asked, found, strict=True):
                root.estimates[name] = expected
                account.is_estimated = True
                account.spent += each

    def promise(self, expected: float) -> float:
        """Return the seconds that draft tokens save beyond the time of their rows, if so many are
        expected to be accepted. Each is right with the same probability if the one before is.
        """
        p, share = expected / (1 + expected), self.row_share
        if p <= share:
            return 0.0
        # Those whose probability, a power of p, is above what a row takes
        number = MAX_NODES if share <= 0 else min(ceil(log(share) / log(p)) - 1, MAX_NODES)
        return self.part * (expected * (1 - p**number) - number * share)

    def asked(self, root: RequestDraft, is_always: bool) -> dict[str, AskedSource]:
        """Choose the sources and models to ask for a request.

        A source that estimates is asked if it promises to save more than it takes, and if one of
        them promises more than planning takes. Others are asked if they have saved time. All are
        asked as a trial if that is due.
        """
        asked, unsure, best = {}, {}, 0.0
        for name, expected in root.estimates.items():
            if expected <= 0 and not is_always:
                continue
            account, promised = root.accounts[name], self.promise(expected)
            net = account.trusted * promised - account.seconds
            if net > 0:
                best = net if net > best else best
                unsure[name] = AskedSource(account.all, False, promised)
            elif is_always or (promised > account.seconds and account.is_exploring):
                asked[name] = AskedSource(account.all, True, promised)
        if root.others:
            self.ask_by_share(asked, root, root.others)
        is_worth = bool(asked) or is_always or best > root.acceptance.planning
        if root.models and root.request.num_output:
            self.ask_by_share(asked, root, root.models)
        if is_worth:
            return asked | unsure if asked else unsure
        for name, one in unsure.items():
            # Planning would take more time than it saves, but only planning shows that.
            if root.accounts[name].is_exploring:
                one.is_trial = True
                asked[name] = one
        return asked

    def ask_by_share(
        self, asked: dict[str, AskedSource], root: RequestDraft, names: Sequence[str]
    ) -> None:
        """Ask sources and models that have an average for each request."""
        for name in names:
            account = root.accounts[name]
            share = account.of(root.request.id)
            if share.pays or account.may_try(share):
                asked[name] = AskedSource(share, not share.pays)
