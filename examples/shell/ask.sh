#!/usr/bin/env bash
# Ask over RabbitMQ with Debian's amqp-tools alone: ./ask.sh "Name three rivers."
# These tools can set neither a message id nor a type: to choose a request's id, to stream, cancel or fetch it, use
# `lanekeeper send`, `cancel` and `result`. If your user may not declare queues, use the one that was declared for its
# replies: REPLY_QUEUE=lane.reply.NAME ./ask.sh …
set -euo pipefail
url=${AMQP_URL:-amqp://localhost:5672}
url=${url%/} # for amqp-tools a slash at the end means a virtual host without a name
queue=${REPLY_QUEUE:-examples.shell.$$}
if [[ -z ${REPLY_QUEUE:-} ]]; then
  amqp-declare-queue --url="$url" --queue="$queue" >/dev/null
  trap 'amqp-delete-queue --url="$url" --queue="$queue" >/dev/null' EXIT
fi
printf '%s' "$1" | python3 -c 'import json, sys; print(json.dumps({"prompt": sys.stdin.read()}))' |
  amqp-publish --url="$url" --exchange=lane.requests --routing-key=critical.examples.shell \
    --content-type=application/json --persistent --reply-to="$queue" --header="x-lane-sent-ms: $(date +%s%3N)"
amqp-consume --url="$url" --queue="$queue" --count=1 cat
echo
