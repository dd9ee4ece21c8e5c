"""What a request passes before a call: deadline, schedule, claim, route, caps, budget.

Each gate has two methods: `enter`, which lets the job pass or returns its outcome, and `leave`. Imported by
`service/worker`.
"""
