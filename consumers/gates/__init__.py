"""What a request passes before a call: deadline, schedule, claim, route, caps, budget.

Each gate has two methods: `enter(job) -> Outcome | None` and `leave`. Imported by `service/worker`.
"""
