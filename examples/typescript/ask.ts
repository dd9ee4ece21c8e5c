// Ask over RabbitMQ: npm install && npx tsx ask.ts "Name three rivers."
import { randomUUID } from "node:crypto";
import amqp from "amqplib";

const connection = await amqp.connect(process.env.AMQP_URL ?? "amqp://localhost:5672/");
const channel = await connection.createConfirmChannel();
const { queue } = await channel.assertQueue("", { exclusive: true });

const answered = new Promise<amqp.ConsumeMessage | null>((resolve) =>
  channel.consume(queue, resolve, { noAck: true }),
);
const id = randomUUID();
const body = { max_tokens: 200, messages: [{ role: "user", content: process.argv[2] }] };
channel.publish("lane.requests", "critical.examples.typescript", Buffer.from(JSON.stringify(body)), {
  contentType: "application/json",
  persistent: true,
  priority: 5,
  messageId: id,
  correlationId: id,
  replyTo: queue,
  headers: { "x-lane-sent-ms": Date.now() },
});
await channel.waitForConfirms(); // rejects where the lane is full

const reply = await answered;
const answer = JSON.parse(reply!.content.toString());
if (reply!.properties.headers?.["x-lane-status"] === "error") {
  console.error(`${answer.title}: ${answer.detail}`);
  process.exitCode = 1;
} else {
  console.log(answer.content.map((block: { text?: string }) => block.text ?? "").join(""));
}
await connection.close();
