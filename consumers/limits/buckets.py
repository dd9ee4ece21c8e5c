"""The three buckets of an account. A request waits for the bucket that makes it wait longest. Pure."""

from collections.abc import Iterator, Sequence

from consumers.limits.amounts import REASONS, Amounts
from consumers.limits.bucket import Bucket
from consumers.limits.burst import Size
from consumers.limits.headers import ROUNDED_BY, RateHeaders


class Buckets:
    """The three buckets, in the order of `Amounts`."""

    __slots__ = ("_all",)

    def __init__(self, per_minute: Amounts, *, sizes: Sequence[Size], shares: Sequence[float], now_s: float) -> None:
        self._all = tuple(
            Bucket(limit, burst_s=size.burst_s, late=size.late, shares=shares, now_s=now_s)
            for limit, size in zip(per_minute, sizes, strict=True)
        )

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all)

    def __getitem__(self, each: int) -> Bucket:
        return self._all[each]

    def resize(self, per_minute: Amounts, *, sizes: Sequence[Size], fills: Sequence[bool]) -> None:
        for bucket, limit, size, fill in zip(self._all, per_minute, sizes, fills, strict=True):
            bucket.resize(limit, burst_s=size.burst_s, late=size.late, fills=fill)

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
        """The bucket that makes it wait longest."""
        waits_s = [
            bucket.wait_s(lane, amount) if amount > 0 else 0.0
            for bucket, amount in zip(self._all, amounts, strict=True)
        ]
        return REASONS[waits_s.index(max(waits_s))]

    def take(self, lane: int, amounts: Amounts) -> Amounts:
        """Spend the amounts. Returns how much of them came from what the lane has saved."""
        requests, input_tokens, output_tokens = self._all
        return Amounts(
            requests.take(lane, amounts.requests),
            input_tokens.take(lane, amounts.input_tokens),
            output_tokens.take(lane, amounts.output_tokens),
        )

    def settle(self, lane: int, taken: Amounts, *, own: Amounts, used: Amounts) -> None:
        """Give back what was not used; take what was used beyond the reservation (`taken`)."""
        for bucket, amount, from_part, spent in zip(self._all, taken, own, used, strict=True):
            if amount > spent:
                bucket.give_back(lane, amount - spent, own=from_part)
            elif spent > amount:
                bucket.take(lane, spent - amount)

    def believe(self, rate: RateHeaders, *, took_s: float, of_refusal: bool) -> None:
        """Lower our levels if the provider announces less. `took_s`: its figures may be this old, so the refill of that
        time is added. Figures of a refusal get no allowance for rounding, because there was less than the call
        needed."""
        for bucket, told, rounded_by in zip(self._all, rate, ROUNDED_BY, strict=True):
            if told.remaining is not None:
                bucket.lower(told.remaining + (0 if of_refusal else rounded_by) + took_s * bucket.per_s)
