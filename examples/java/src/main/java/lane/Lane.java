package lane;

import com.rabbitmq.client.AMQP.BasicProperties;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.Delivery;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.json.JSONObject;

/**
 * Lanekeeper over RabbitMQ with amqp-client alone:
 *
 * <pre>
 * mvn -q compile exec:java -Dexec.args="ask 'Name three rivers.'"     or stream, publish
 * mvn -q compile exec:java -Dexec.args="cancel ID"                    or result
 * </pre>
 */
public final class Lane {
  /** Direct reply-to: replies come to the channel that published. It needs no right to declare a queue. */
  private static final String DIRECT_REPLY_TO = "amq.rabbitmq.reply-to";

  public static void main(String[] args) throws Exception {
    String what = args[0], text = args[1];
    boolean isControl = List.of("cancel", "result").contains(what);
    var factory = new ConnectionFactory();
    // for this client a slash at the end of the URL means a virtual host without a name
    factory.setUri(System.getenv().getOrDefault("AMQP_URL", "amqp://localhost:5672").replaceFirst("/$", ""));
    try (var connection = factory.newConnection();
        var channel = connection.createChannel()) {
      channel.confirmSelect();
      BlockingQueue<Delivery> replies = new LinkedBlockingQueue<>();
      // must be on the channel that publishes, and before the publish
      channel.basicConsume(DIRECT_REPLY_TO, true, (tag, reply) -> replies.add(reply), tag -> {});

      String id = UUID.randomUUID().toString();
      var properties =
          new BasicProperties.Builder()
              .contentType("application/json")
              .deliveryMode(2)
              .priority(5)
              .messageId(id)
              .correlationId(id)
              .replyTo(what.equals("publish") ? null : DIRECT_REPLY_TO);
      JSONObject body;
      if (isControl) {
        properties.type(what); // the same as the routing key
        body = new JSONObject().put(what, text);
      } else {
        var headers = new HashMap<String, Object>();
        headers.put("x-lane-sent-ms", System.currentTimeMillis());
        headers.put("x-lane-stream", what.equals("stream"));
        if (System.getenv("TRACEPARENT") != null) { // the request's spans then belong to the caller's trace
          headers.put("traceparent", System.getenv("TRACEPARENT"));
        }
        properties.headers(headers);
        var message = new JSONObject().put("role", "user").put("content", text);
        body = new JSONObject().put("max_tokens", 1024).put("messages", List.of(message));
      }
      channel.basicPublish(
          isControl ? "lane.control" : "lane.requests",
          isControl ? what : "critical.examples.java",
          properties.build(),
          body.toString().getBytes(StandardCharsets.UTF_8));
      channel.waitForConfirmsOrDie(30_000); // throws if the lane is full

      if (what.equals("publish")) {
        System.out.println(id); // to cancel it, or to fetch its result
        return;
      }
      Delivery reply;
      do {
        reply = replies.poll(2, TimeUnit.MINUTES);
      } while (reply != null && !isLast(reply, what.equals("stream")));
      if (reply == null) {
        System.err.println("no answer within two minutes");
        System.exit(1);
      }
    }
  }

  /** Prints a reply, and returns whether it is the last one. */
  private static boolean isLast(Delivery reply, boolean streamed) {
    var headers = reply.getProperties().getHeaders();
    String part = text(headers.get("x-lane-part")), control = text(headers.get("x-lane-control"));
    var found = new JSONObject(new String(reply.getBody(), StandardCharsets.UTF_8));
    if (part.equals("restart")) {
      System.out.println("\n[from the beginning]"); // an attempt failed: discard the parts so far
    } else if (part.equals("event")) {
      var delta = found.optJSONObject("delta", new JSONObject());
      System.out.print(delta.optString("text"));
      System.out.flush();
    } else if (control.equals("error") || text(headers.get("x-lane-status")).equals("error")) {
      System.err.println(found.getString("title") + ": " + found.getString("detail"));
      System.exit(1);
    } else if (control.equals("accepted")) { // recorded, told, ended or unseen
      System.out.println(found.getString("outcome"));
    } else if (control.equals("pending")) { // running, waiting or unknown
      System.out.println(found.getString("status") + " " + found.optString("due_at"));
    } else if (headers.containsKey("x-lane-body")) { // this example does not fetch it
      System.err.println("the answer is large: it lies at " + headers.get("x-lane-body"));
      System.exit(1);
    } else if (streamed) { // the whole answer, which has been printed
      System.out.println();
    } else {
      for (Object block : found.getJSONArray("content")) {
        System.out.print(((JSONObject) block).optString("text"));
      }
      System.out.println();
    }
    return part.isEmpty();
  }

  private static String text(Object header) {
    return header == null ? "" : header.toString();
  }
}
