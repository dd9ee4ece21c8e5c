"""Lanekeeper in a Celery task: the task waits for its turn in the lane, and Lanekeeper for the provider's budget.

pip install ./lanekeeper celery; celery --app celery_task worker
"""

import os

from celery import Celery, Task

from lanekeeper import BrokerError, NoReply
from lanekeeper.sync import Client

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
app = Celery("tasks", broker=URL, backend="rpc://")
# connects on first use, in each process that the worker forks
lanes = Client(URL)


@app.task(bind=True, acks_late=True, autoretry_for=(BrokerError, NoReply), retry_backoff=True)
def summarise(self: Task, text: str) -> str:
    # under the task's id, a task that runs a second time is still one request: it gets the first answer, and costs once
    message_id = self.request.id
    answer = lanes.request({"prompt": text}, key="batch.tasks.summarise", message_id=message_id, deadline_s=600)
    return answer.text
