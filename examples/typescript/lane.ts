// Lanekeeper over RabbitMQ with amqplib alone:
//   npm install && npx tsx lane.ts ask|stream|publish "Name three rivers."
//   npx tsx lane.ts cancel|result ID
import { randomUUID } from "node:crypto";
import amqp from "amqplib";

const [what, text] = process.argv.slice(2);
const connection = await amqp.connect(process.env.AMQP_URL ?? "amqp://localhost:5672/");
const channel = await connection.createConfirmChannel();
const directReplyTo = "amq.rabbitmq.reply-to"; // needs no right to declare a queue

// must be on the channel that publishes, and before the publish
const ended = new Promise<void>((resolve) =>
  channel.consume(directReplyTo, (reply) => reply && isLast(reply) && resolve(), { noAck: true }),
);
const id = randomUUID();
const properties = {
  contentType: "application/json",
  persistent: true,
  priority: 5,
  messageId: id,
  correlationId: id,
  replyTo: what === "publish" ? undefined : directReplyTo,
};
if (what === "cancel" || what === "result") {
  const body = JSON.stringify({ [what]: text });
  channel.publish("lane.control", what, Buffer.from(body), { ...properties, type: what }); // key and type are the same
} else {
  const body = JSON.stringify({ max_tokens: 1024, messages: [{ role: "user", content: text }] });
  channel.publish("lane.requests", "critical.examples.typescript", Buffer.from(body), {
    ...properties,
    headers: {
      "x-lane-sent-ms": Date.now(),
      "x-lane-stream": what === "stream",
      traceparent: process.env.TRACEPARENT, // the request's spans then belong to the caller's trace
    },
  });
}
await channel.waitForConfirms(); // rejects if the lane is full
if (what === "publish") console.log(id); // to cancel it, or to fetch its result
else await ended;
await connection.close();

/** Prints a reply, and returns whether it is the last one. */
function isLast(reply: amqp.ConsumeMessage): boolean {
  const headers = reply.properties.headers ?? {};
  const found = JSON.parse(reply.content.toString());
  if (headers["x-lane-part"] === "restart") {
    console.log("\n[from the beginning]"); // an attempt failed: discard the parts so far
    return false;
  }
  if (headers["x-lane-part"] === "event") {
    process.stdout.write(found.delta?.text ?? "");
    return false;
  }
  if (headers["x-lane-control"] === "error" || headers["x-lane-status"] === "error") {
    console.error(`${found.title}: ${found.detail}`);
    process.exitCode = 1;
  } else if (headers["x-lane-control"]) {
    // accepted: recorded, told, ended or unseen; pending: running, waiting or unknown
    console.log(found.outcome ?? found.status, found.due_at ?? "");
  } else if (headers["x-lane-body"]) {
    console.error(`the answer is large: it lies at ${headers["x-lane-body"]}`); // this example does not fetch it
    process.exitCode = 1;
  } else {
    const whole = found.content.map((block: { text?: string }) => block.text ?? "").join("");
    console.log(what === "stream" ? "" : whole); // a streamed answer has been printed already
  }
  return true;
}
