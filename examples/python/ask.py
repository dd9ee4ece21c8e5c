"""Ask over RabbitMQ with pika alone: python ask.py "Name three rivers." """

import json
import os
import sys
import time
import uuid

import pika

connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost:5672/")))
channel = connection.channel()
channel.confirm_delivery()  # basic_publish now raises if the broker does not confirm the request


def read(channel, _method, properties, body):
    answer = json.loads(body)
    if properties.headers["x-lane-status"] == "error":
        sys.exit(f"{answer['title']}: {answer['detail']}")
    print("".join(block.get("text", "") for block in answer["content"]))
    channel.stop_consuming()


channel.basic_consume("amq.rabbitmq.reply-to", read, auto_ack=True)  # on this channel, before the request is published
request_id = str(uuid.uuid4())
channel.basic_publish(
    exchange="lane.requests",
    routing_key="critical.examples.python",  # lane.application.task
    body=json.dumps({"max_tokens": 200, "messages": [{"role": "user", "content": sys.argv[1]}]}),
    properties=pika.BasicProperties(
        content_type="application/json",
        delivery_mode=pika.DeliveryMode.Persistent,
        priority=5,
        message_id=request_id,
        correlation_id=request_id,
        reply_to="amq.rabbitmq.reply-to",
        headers={"x-lane-sent-ms": int(time.time() * 1000)},
    ),
)
channel.start_consuming()
connection.close()  # if it is lost before the answer comes, `lanekeeper result ID` fetches the answer, for a day
