"""Cancel a request, or fetch its result, with pika alone: python control.py cancel ID, python control.py result ID"""

import json
import os
import sys
import time
import uuid

import pika

what, request_id = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost:5672/")))
channel = connection.channel()
channel.confirm_delivery()


def read(_channel, _method, properties, body):
    global answered
    answer = json.loads(body)
    if properties.headers.get("x-lane-control") == "error" or properties.headers.get("x-lane-status") == "error":
        sys.exit(f"{answer['title']}: {answer['detail']}")
    if properties.headers.get("x-lane-control"):
        # accepted: recorded, told, ended or unseen; pending: running, waiting or unknown
        print(answer.get("outcome") or answer["status"], answer.get("due_at", ""))
    else:  # the final reply again
        print("".join(block.get("text", "") for block in answer["content"]))
    answered = True


answered = False
channel.basic_consume("amq.rabbitmq.reply-to", read, auto_ack=True)  # on this channel, before the message is published
channel.basic_publish(
    exchange="lane.control",
    routing_key=what,
    body=json.dumps({what: request_id}),
    properties=pika.BasicProperties(
        type=what,  # the same as the routing key
        content_type="application/json",
        delivery_mode=pika.DeliveryMode.Persistent if what == "cancel" else pika.DeliveryMode.Transient,
        expiration=None if what == "cancel" else "10000",
        correlation_id=str(uuid.uuid4()),
        reply_to="amq.rabbitmq.reply-to",
    ),
)
end = time.monotonic() + 10
while not answered and time.monotonic() < end:
    connection.process_data_events(time_limit=1)
connection.close()
if not answered:
    kept = "; the cancellation is kept until one runs" if what == "cancel" else ""
    sys.exit(f"no worker answered within 10 s{kept}")
