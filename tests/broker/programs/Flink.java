import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.runtime.util.EnvironmentInformation;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;

/**
 * What Flink's connector does with a broker: reads a topic and writes another, exactly once, through a failure.
 *
 * <p>Called with the address of a broker. Ends as one line: "flink", and "ok" or what went wrong.
 */
public final class Flink {
    private static final String TEXT = "org.apache.kafka.common.serialization.String";
    private static final int COUNT = 2_000;
    private static String address;

    /** Passes records on, slowly enough for some checkpoints, and fails once on the way. */
    public static final class FailsOnce implements MapFunction<String, String> {
        private static final AtomicInteger SEEN = new AtomicInteger();

        @Override
        public String map(String value) throws Exception {
            if (SEEN.incrementAndGet() == COUNT / 2) {
                throw new IllegalStateException("once, as wanted");
            }
            Thread.sleep(1);
            return "seen " + value;
        }
    }

    public static void main(String[] given) {
        address = given[0];
        System.out.println("version\t" + EnvironmentInformation.getVersion());
        String outcome = "ok";
        try {
            topics();
            copy();
            check();
        } catch (Throwable problem) {
            outcome = problem.toString().replace("\n", " | ");
        }
        System.out.println("flink\t" + outcome);
        System.exit(0);
    }

    private static void topics() throws Exception {
        try (AdminClient admin = AdminClient.create(with(Map.of()))) {
            var topics = List.of(new NewTopic("flink-in", 2, (short) 1), new NewTopic("flink-out", 2, (short) 1));
            admin.createTopics(topics).all().get(30, TimeUnit.SECONDS);
        }
        try (var producer = new KafkaProducer<String, String>(with(Map.of("acks", "all")))) {
            for (int number = 0; number < COUNT; number++) {
                producer.send(new ProducerRecord<>("flink-in", "key" + number % 7, "" + number));
            }
        }
    }

    private static void copy() throws Exception {
        var settings = new Configuration();
        settings.setString("restart-strategy.type", "fixed-delay");
        settings.setString("restart-strategy.fixed-delay.attempts", "1");
        settings.setString("restart-strategy.fixed-delay.delay", "100 ms");
        settings.setString("taskmanager.memory.network.max", "64mb");
        settings.setString("taskmanager.memory.network.min", "64mb");
        settings.setString("taskmanager.memory.managed.size", "64mb");
        var flink = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        flink.setParallelism(2);
        flink.enableCheckpointing(200);
        KafkaSource<String> source = KafkaSource.<String>builder()
            .setBootstrapServers(address)
            .setTopics("flink-in")
            .setGroupId("flink")
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setBounded(OffsetsInitializer.latest())
            .setValueOnlyDeserializer(new SimpleStringSchema())
            .build();
        KafkaSink<String> sink = KafkaSink.<String>builder()
            .setBootstrapServers(address)
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix("flink")
            .setProperty("transaction.timeout.ms", "60000")
            .setRecordSerializer(KafkaRecordSerializationSchema.<String>builder()
                .setTopic("flink-out")
                .setValueSerializationSchema(new SimpleStringSchema())
                .build())
            .build();
        flink.fromSource(source, WatermarkStrategy.noWatermarks(), "in").map(new FailsOnce()).sinkTo(sink);
        flink.execute();
        if (FailsOnce.SEEN.get() <= COUNT) {
            throw new AssertionError("it did not fail on the way");
        }
    }

    private static void check() {
        List<String> found = new ArrayList<>();
        try (var reader = new KafkaConsumer<String, String>(with(Map.of("group.id", "flink-reader",
            "auto.offset.reset", "earliest", "isolation.level", "read_committed")))) {
            reader.subscribe(List.of("flink-out"));
            long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
            while (found.size() < COUNT && System.nanoTime() < end) {
                reader.poll(Duration.ofMillis(100)).forEach(record -> found.add(record.value()));
            }
            reader.poll(Duration.ofMillis(500)).forEach(record -> found.add(record.value()));
        }
        var distinct = new HashSet<>(found);
        boolean whole = true;
        for (int number = 0; number < COUNT; number++) {
            whole &= distinct.contains("seen " + number);
        }
        if (!whole || found.size() != COUNT) {
            throw new AssertionError(found.size() + " records, " + distinct.size() + " of them different, of " + COUNT);
        }
    }

    private static Map<String, Object> with(Map<String, Object> more) {
        Map<String, Object> all = new HashMap<>(more);
        all.put("bootstrap.servers", address);
        all.put("key.serializer", TEXT + "Serializer");
        all.put("value.serializer", TEXT + "Serializer");
        all.put("key.deserializer", TEXT + "Deserializer");
        all.put("value.deserializer", TEXT + "Deserializer");
        return all;
    }
}
