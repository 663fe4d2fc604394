import java.io.PrintStream;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.utils.AppInfoParser;

/**
 * A worker of a share group. What it does with a record is what the record's value says.
 *
 * <p>Called with the address of a broker, a group, a topic, "explicit" or "implicit", and settings of
 * the consumer as name=value. It prints a line for each record that it is given ("got", value, delivery
 * count, milliseconds), and one for each whose acknowledgement has been confirmed ("said", value, verdict,
 * milliseconds). It runs until its input ends, closes then, and prints "closed".
 */
public final class Shares {
    private static final PrintStream TOLD = System.out;
    private static int renewals;

    public static void main(String[] given) throws Exception {
        boolean explicit = given[3].equals("explicit");
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", given[0]);
        settings.put("group.id", given[1]);
        settings.put("share.acknowledgement.mode", given[3]);
        settings.put("reconnect.backoff.max.ms", "200");
        for (int at = 4; at < given.length; at++) {
            String[] parts = given[at].split("=", 2);
            settings.put(parts[0], parts[1]);
        }
        StringDeserializer text = new StringDeserializer();
        TOLD.println("version\t" + AppInfoParser.getVersion());
        try (KafkaShareConsumer<String, String> consumer = new KafkaShareConsumer<>(settings, text, text)) {
            consumer.subscribe(List.of(given[2]));
            while (System.in.available() == 0) {
                List<String> said = new ArrayList<>();
                for (ConsumerRecord<String, String> one : consumer.poll(Duration.ofMillis(200))) {
                    tell("got", one.value(), String.valueOf(one.deliveryCount().orElse((short) -1)));
                    AcknowledgeType verdict = verdict(one);
                    if (one.value().startsWith("slow") || one.value().startsWith("renewed")) {
                        Thread.sleep(Long.parseLong(one.value().split("-")[1]));
                    }
                    if (explicit) {
                        consumer.acknowledge(one, verdict);
                    } else if (verdict != AcknowledgeType.ACCEPT) {
                        throw new IllegalStateException("implicit acknowledgement accepts");
                    }
                    said.add(one.value() + "\t" + verdict);
                }
                Map<TopicIdPartition, Optional<KafkaException>> outcomes = consumer.commitSync();
                for (Map.Entry<TopicIdPartition, Optional<KafkaException>> one : outcomes.entrySet()) {
                    one.getValue().ifPresent(error -> tell("failed", one.getKey().toString(), error.toString()));
                }
                if (!outcomes.isEmpty() && outcomes.values().stream().allMatch(Optional::isEmpty)) {
                    said.forEach(line -> tell("said", line));
                }
            }
        }
        tell("closed");
    }

    private static AcknowledgeType verdict(ConsumerRecord<String, String> one) {
        int deliveries = one.deliveryCount().orElse((short) 0);
        String kind = one.value().split("-")[0];
        return switch (kind) {
            case "again" -> deliveries < 3 ? AcknowledgeType.RELEASE : AcknowledgeType.ACCEPT;
            case "bad" -> AcknowledgeType.REJECT;
            case "poison" -> AcknowledgeType.RELEASE;
            // One that is renewed is given again by the next poll, as it stands.
            case "renewed" -> ++renewals < 3 ? AcknowledgeType.RENEW : AcknowledgeType.ACCEPT;
            default -> AcknowledgeType.ACCEPT;
        };
    }

    private static void tell(String... words) {
        TOLD.println(String.join("\t", words) + "\t" + System.currentTimeMillis());
        TOLD.flush();
    }
}
