"""The checks before a call to a provider, in order: deadline, schedule, claim, body, route, daily caps, budget.

Each gate has two methods: `enter`, which lets the job pass or returns its outcome, and `leave`. Imported by
`service/worker`.
"""
