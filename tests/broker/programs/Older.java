import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.utils.AppInfoParser;

/**
 * What Java's clients of years ago do with a broker: topics, an exactly-once copy, a group.
 *
 * <p>Called with the address of a broker. Ends as one line: "older", and "ok" or what went wrong.
 */
public final class Older {
    private static final String TEXT = "org.apache.kafka.common.serialization.String";
    private static String address;

    public static void main(String[] given) {
        address = given[0];
        System.out.println("version\t" + AppInfoParser.getVersion());
        String outcome = "ok";
        try {
            copy();
        } catch (Throwable problem) {
            outcome = problem.toString().replace("\n", " | ");
        }
        System.out.println("older\t" + outcome);
        System.exit(0);
    }

    private static void copy() throws Exception {
        try (AdminClient admin = AdminClient.create(with(Map.of()))) {
            var topics = List.of(new NewTopic("older-in", 2, (short) 1), new NewTopic("older-out", 1, (short) 1));
            admin.createTopics(topics).all().get(30, TimeUnit.SECONDS);
            check(admin.describeTopics(Set.of("older-in")).all().get().get("older-in").partitions().size() == 2, "partitions");
        }
        try (var producer = new KafkaProducer<String, String>(with(Map.of("acks", "all", "enable.idempotence", true, "compression.type", "lz4")))) {
            for (int number = 0; number < 500; number++) {
                producer.send(new ProducerRecord<>("older-in", "key" + number % 5, "" + number));
            }
        }
        try (var source = consumer("older", "older-in");
            var producer = new KafkaProducer<String, String>(with(Map.of("transactional.id", "older")))) {
            producer.initTransactions();
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            producer.beginTransaction();
            int count = 0;
            for (long end = end(); count < 500; ) {
                check(System.nanoTime() < end, count + " of 500 records");
                for (var record : source.poll(Duration.ofMillis(100))) {
                    producer.send(new ProducerRecord<>("older-out", record.value()));
                    offsets.put(new TopicPartition(record.topic(), record.partition()), new OffsetAndMetadata(record.offset() + 1));
                    count++;
                }
            }
            producer.sendOffsetsToTransaction(offsets, "older");
            producer.commitTransaction();
            for (var one : offsets.entrySet()) {
                check(source.committed(one.getKey()).offset() == one.getValue().offset(), one);
            }
        }
        try (var reader = consumer("older-reader", "older-out")) {
            List<String> found = new ArrayList<>();
            for (long end = end(); found.size() < 500; ) {
                check(System.nanoTime() < end, found.size() + " of 500 records");
                reader.poll(Duration.ofMillis(100)).forEach(record -> found.add(record.value()));
            }
            check(Set.copyOf(found).size() == 500 && found.size() == 500, found.size());
            reader.commitSync();
        }
    }

    private static KafkaConsumer<String, String> consumer(String group, String topic) {
        var made = new KafkaConsumer<String, String>(with(Map.of("group.id", group, "auto.offset.reset", "earliest",
            "enable.auto.commit", false, "isolation.level", "read_committed", "heartbeat.interval.ms", 200)));
        made.subscribe(List.of(topic));
        return made;
    }

    private static Map<String, Object> with(Map<String, Object> more) {
        Map<String, Object> all = new HashMap<>(more);
        all.put("bootstrap.servers", address);
        for (String part : List.of("key", "value")) {
            all.put(part + ".serializer", TEXT + "Serializer");
            all.put(part + ".deserializer", TEXT + "Deserializer");
        }
        return all;
    }

    private static long end() {
        return System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
    }

    private static void check(boolean isTrue, Object what) {
        if (!isTrue) {
            throw new AssertionError(what);
        }
    }
}
