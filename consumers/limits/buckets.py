"""The three token buckets of a provider's account. A request waits until it may take what it needs from all three.
Without I/O."""

from collections.abc import Iterator, Sequence

from consumers.limits.base import REASONS, Amounts
from consumers.limits.bucket import Bucket
from consumers.limits.burst import Size
from consumers.limits.headers import ROUNDED_BY, RateHeaders


class Buckets:
    """The token buckets of a provider's account: of requests, input tokens and output tokens, in this order."""

    def __init__(self, per_minute: Amounts, *, sizes: Sequence[Size], shares: Sequence[float], now_s: float) -> None:
        self._all = tuple(
            Bucket(limit, size, shares=shares, now_s=now_s) for limit, size in zip(per_minute, sizes, strict=True)
        )

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all)

    def __getitem__(self, index: int) -> Bucket:
        return self._all[index]

    def resize(self, per_minute: Amounts, *, sizes: Sequence[Size], fills: Sequence[bool]) -> None:
        for bucket, limit, size, fill in zip(self._all, per_minute, sizes, fills, strict=True):
            bucket.resize(limit, size, fills=fill)

    def refill(self, now_s: float) -> None:
        for bucket in self._all:
            bucket.refill(now_s)

    def want(self, lane: int, amounts: Amounts) -> None:
        for bucket, amount in zip(self._all, amounts, strict=True):
            bucket.want(lane, amount)

    def wait_s(self, lane: int, amounts: Amounts) -> float:
        longest_s = 0.0
        for bucket, amount in zip(self._all, amounts):  # noqa: B905  checking costs a tenth of a grant
            if amount > 0 and (in_s := bucket.wait_s(lane, amount)) > longest_s:
                longest_s = in_s
        return longest_s

    def reason(self, lane: int, amounts: Amounts) -> str:
        """The name of the limit whose bucket makes a request wait longest."""
        waits_s = [
            bucket.wait_s(lane, amount) if amount > 0 else 0.0
            for bucket, amount in zip(self._all, amounts, strict=True)
        ]
        return REASONS[waits_s.index(max(waits_s))]

    def take(self, lane: int, amounts: Amounts) -> Amounts:
        """Take the amounts out of the buckets for a call of this lane. Returns how much of each came from the lane's
        savings."""
        requests, input_tokens, output_tokens = self._all
        return Amounts(
            requests.take(lane, amounts.requests),
            input_tokens.take(lane, amounts.input_tokens),
            output_tokens.take(lane, amounts.output_tokens),
        )

    def settle(self, lane: int, taken: Amounts, *, from_savings: Amounts, used: Amounts) -> None:
        """After a call: give back to the buckets what was taken for it and not used, and take from them what it used
        beyond that. `from_savings`: the result of `take`."""
        for bucket, amount, saved, spent in zip(self._all, taken, from_savings, used, strict=True):
            if amount > spent:
                bucket.give_back(lane, amount - spent, from_savings=saved)
            elif spent > amount:
                bucket.take(lane, spent - amount)

    def lower(self, rate: RateHeaders, *, took_s: float, of_refusal: bool) -> None:
        """Lower the levels of the token buckets to what the provider says is left of its limits, if that is less than
        the level. `took_s`: the greatest possible age of the provider's numbers; the amount that flows in during this
        time is added to them. The largest possible rounding error of the numbers is added as well, except after a
        refusal, which proves that less was left than the call needed."""
        for bucket, header, rounded_by in zip(self._all, rate, ROUNDED_BY, strict=True):
            if header.remaining is not None:
                bucket.lower(header.remaining + (0 if of_refusal else rounded_by) + took_s * bucket.per_s)
