import java.io.ByteArrayInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.io.UncheckedIOException;
import java.net.ServerSocket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.SaslAuthenticationException;
import org.apache.kafka.common.serialization.LongDeserializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.common.utils.AppInfoParser;
import org.apache.kafka.common.utils.Exit;
import org.apache.kafka.connect.cli.ConnectDistributed;
import org.apache.kafka.streams.CloseOptions;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Produced;

/**
 * What Kafka's own clients and tools do with a broker, part by part, in one JVM.
 *
 * <p>Called with the address of a broker, a folder for what parts print and keep, and the address,
 * certificate, user and password of a broker that asks for them. Each part ends as one line: its
 * name, and "ok" or what went wrong.
 */
public final class Clients {
    private static final Duration POLL = Duration.ofMillis(100);
    private static final PrintStream TOLD = System.out;
    private static String address;
    private static Path folder;
    private static Map<String, Object> secure;

    interface Part {
        void run() throws Exception;
    }

    /** What a tool of the command line ends with, in place of ending the JVM. */
    static final class Ended extends RuntimeException {
        final int status;

        Ended(int status) {
            super("exit " + status);
            this.status = status;
        }
    }

    public static void main(String[] given) throws Exception {
        address = given[0];
        folder = Path.of(given[1]);
        secure = Map.of(
            "bootstrap.servers", given[2],
            "security.protocol", "SASL_SSL",
            "ssl.truststore.type", "PEM",
            "ssl.truststore.location", given[3],
            "sasl.mechanism", "PLAIN",
            "sasl.jaas.config", login(given[4], given[5]));
        Exit.setExitProcedure((status, message) -> { throw new Ended(status); });
        TOLD.println("version\t" + AppInfoParser.getVersion());
        part("records", Clients::records);
        part("rebalance", Clients::rebalance);
        part("transactions", Clients::transactions);
        part("administration", Clients::administration);
        part("password", Clients::password);
        part("console", Clients::console);
        part("verifiable", Clients::verifiable);
        part("streams", Clients::streams);
        part("connect", Clients::connect);
        Runtime.getRuntime().halt(0);
    }

    private static void part(String name, Part part) throws Exception {
        String outcome = "ok";
        long began = System.nanoTime();
        try (PrintStream printed = new PrintStream(new FileOutputStream(folder.resolve(name).toFile()))) {
            System.setOut(printed);
            part.run();
        } catch (Throwable problem) {
            StringWriter trace = new StringWriter();
            problem.printStackTrace(new PrintWriter(trace));
            outcome = trace.toString().replace("\n", " | ");
        }
        TOLD.println(name + "\t" + outcome + "\t" + (System.nanoTime() - began) / 1_000_000);
    }

    // -- records ------------------------------------------------------------------------------

    private static void records() throws Exception {
        List<String> compressions = List.of("none", "gzip", "snappy", "lz4", "zstd");
        create("java-records", 3);
        for (String compression : compressions) {
            try (var producer = producer(Map.of("compression.type", compression, "linger.ms", 5))) {
                for (int number = 0; number < 300; number++) {
                    var record = new ProducerRecord<>("java-records", "key" + number % 7, compression + number);
                    record.headers().add("a", new byte[] {1});
                    producer.send(record, (place, error) -> check(error == null, error));
                }
            }
        }
        List<ConsumerRecord<String, String>> found;
        try (var consumer = consumer("java", Map.of())) {
            consumer.subscribe(List.of("java-records"));
            found = take(consumer, 1500);
            consumer.commitSync();
        }
        for (int key = 0; key < 7; key++) { // in the order in which they were sent
            String wanted = "key" + key;
            int first = key;
            List<String> values = found.stream().filter(one -> one.key().equals(wanted)).map(ConsumerRecord::value).toList();
            List<String> sent = compressions.stream().flatMap(name -> IntStream.range(0, 300)
                .filter(number -> number % 7 == first).mapToObj(number -> name + number)).toList();
            check(values.equals(sent), values);
        }
        check(found.get(0).headers().lastHeader("a").value()[0] == 1, "header");
        try (var admin = admin()) {
            var offsets = admin.listConsumerGroupOffsets("java").partitionsToOffsetAndMetadata().get();
            check(offsets.values().stream().mapToLong(OffsetAndMetadata::offset).sum() == 1500, offsets);
        }
        try (var consumer = consumer("java", Map.of())) { // goes on where the group was
            consumer.subscribe(List.of("java-records"));
            until("assigned", () -> consumer.poll(POLL).isEmpty() && !consumer.assignment().isEmpty());
            check(consumer.poll(POLL).isEmpty(), "read again");
            var times = consumer.offsetsForTimes(Map.of(new TopicPartition("java-records", 0), 0L));
            check(times.get(new TopicPartition("java-records", 0)).offset() == 0, times);
        }
    }

    private static void rebalance() throws Exception {
        create("java-shared", 4);
        var cooperative = Map.<String, Object>of("partition.assignment.strategy", CooperativeStickyAssignor.class.getName());
        try (var one = consumer("shared", cooperative); var other = consumer("shared", cooperative)) {
            one.subscribe(List.of("java-shared"));
            other.subscribe(List.of("java-shared"));
            until("shared", () -> {
                one.poll(POLL);
                other.poll(POLL);
                return one.assignment().size() == 2 && other.assignment().size() == 2;
            });
            Set<TopicPartition> all = new HashSet<>(one.assignment());
            all.addAll(other.assignment());
            check(all.size() == 4, all);
            other.unsubscribe();
            until("taken over", () -> {
                one.poll(POLL);
                return one.assignment().size() == 4;
            });
        }
    }

    private static void transactions() throws Exception {
        create("java-in", 1);
        create("java-out", 2);
        var id = Map.<String, Object>of("transactional.id", "java");
        try (var producer = producer(id); var source = consumer("java-txn", Map.of())) {
            producer.initTransactions();
            for (int round = 0; round < 3; round++) {
                producer.beginTransaction();
                for (int number = 0; number < 10; number++) {
                    producer.send(new ProducerRecord<>("java-out", number % 2, null, "round" + round));
                }
                producer.sendOffsetsToTransaction(
                    Map.of(new TopicPartition("java-in", 0), new OffsetAndMetadata(round + 1)), source.groupMetadata());
                if (round == 1) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
            var committed = source.committed(Set.of(new TopicPartition("java-in", 0)));
            check(committed.get(new TopicPartition("java-in", 0)).offset() == 3, committed);
            try (var newer = producer(id)) {
                newer.initTransactions();
                boolean fenced = false;
                try {
                    producer.beginTransaction();
                    producer.send(new ProducerRecord<>("java-out", "late"));
                    producer.commitTransaction();
                } catch (ProducerFencedException expected) {
                    fenced = true;
                } catch (KafkaException error) {
                    fenced = error.getCause() instanceof ProducerFencedException
                        || error.getCause() instanceof org.apache.kafka.common.errors.InvalidProducerEpochException;
                }
                check(fenced, "the older producer was not told");
            }
        }
        try (var reader = consumer("java-committed", Map.of("isolation.level", "read_committed"))) {
            reader.subscribe(List.of("java-out"));
            List<String> found = take(reader, 20).stream().map(ConsumerRecord::value).sorted().toList();
            check(found.get(0).equals("round0") && found.get(10).equals("round2"), found);
        }
    }

    private static void administration() throws Exception {
        try (var admin = admin()) {
            check(admin.describeCluster().nodes().get().size() == 1, "one broker");
            create("java-admin", 1);
            admin.createPartitions(Map.of("java-admin", NewPartitions.increaseTo(3))).all().get();
            check(admin.describeTopics(List.of("java-admin")).allTopicNames().get().get("java-admin").partitions().size() == 3, "partitions");
            var topic = new ConfigResource(ConfigResource.Type.TOPIC, "java-admin");
            var entry = new ConfigEntry("retention.ms", "3600000");
            admin.incrementalAlterConfigs(Map.of(topic, List.of(new AlterConfigOp(entry, AlterConfigOp.OpType.SET)))).all().get();
            check(admin.describeConfigs(List.of(topic)).all().get().get(topic).get("retention.ms").value().equals("3600000"), "config");
            var partition = new TopicPartition("java-admin", 0);
            try (var producer = producer(Map.of())) {
                for (int number = 0; number < 10; number++) {
                    producer.send(new ProducerRecord<>("java-admin", 0, null, "x"));
                }
            }
            admin.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(4))).all().get();
            check(admin.listOffsets(Map.of(partition, OffsetSpec.earliest())).all().get().get(partition).offset() == 4, "earliest");
            check(admin.listOffsets(Map.of(partition, OffsetSpec.latest())).all().get().get(partition).offset() == 10, "latest");
            check(admin.listOffsets(Map.of(partition, OffsetSpec.maxTimestamp())).partitionResult(partition) != null, "maximum");
            admin.alterConsumerGroupOffsets("java-moved", Map.of(partition, new OffsetAndMetadata(7))).all().get();
            check(admin.listGroups().all().get().stream().anyMatch(one -> one.groupId().equals("java-moved")), "groups");
            var described = admin.describeConsumerGroups(List.of("java-moved")).all().get();
            check(described.get("java-moved").members().isEmpty(), described);
            admin.deleteConsumerGroups(List.of("java-moved")).all().get();
            admin.deleteTopics(List.of("java-admin")).all().get();
            check(!admin.listTopics().names().get().contains("java-admin"), "deleted");
        }
    }

    private static void password() throws Exception {
        try (var admin = Admin.create(new HashMap<>(secure))) {
            admin.createTopics(List.of(new NewTopic("java-secure", 1, (short) 1))).all().get();
        }
        try (var producer = new KafkaProducer<>(with(texts(), secure))) {
            producer.send(new ProducerRecord<>("java-secure", "x")).get();
        }
        Map<String, Object> wrong = new HashMap<>(secure);
        wrong.put("sasl.jaas.config", login("alice", "wrong"));
        try (var admin = Admin.create(wrong)) {
            admin.listTopics().names().get();
            throw new AssertionError("a wrong password was let in");
        } catch (java.util.concurrent.ExecutionException error) {
            check(error.getCause() instanceof SaslAuthenticationException, error);
        }
    }

    // -- tools and streams --------------------------------------------------------------------

    private static void console() throws Exception {
        create("java-console", 1);
        InputStream keyboard = System.in;
        System.setIn(new ByteArrayInputStream("k1:one\nk2:two\nk3:three\n".getBytes(StandardCharsets.UTF_8)));
        try {
            tool("org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", address, "--topic", "java-console",
                "--reader-property", "parse.key=true", "--reader-property", "key.separator=:");
        } finally {
            System.setIn(keyboard);
        }
        tool("org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", address, "--topic", "java-console",
            "--from-beginning", "--max-messages", "3", "--timeout-ms", "30000", "--group", "console",
            "--formatter-property", "print.key=true", "--formatter-property", "print.offset=true");
    }

    private static void verifiable() throws Exception {
        create("java-verifiable", 2);
        tool("org.apache.kafka.tools.VerifiableProducer", "--bootstrap-server", address, "--topic", "java-verifiable",
            "--max-messages", "2000", "--acks", "-1");
        tool("org.apache.kafka.tools.VerifiableConsumer", "--bootstrap-server", address, "--topic", "java-verifiable",
            "--group-id", "verifiable", "--max-messages", "2000", "--reset-policy", "earliest");
    }

    /** Counts words exactly once; then, with its state folder gone, goes on from its changelog. */
    private static void streams() throws Exception {
        create("lines", 2);
        create("counts", 2);
        count("first", List.of("to be or not to be", "that is the question"), Map.of("to", 2L, "be", 2L, "question", 1L));
        count("second", List.of("to be asked", "the question"), Map.of("to", 3L, "be", 3L, "question", 2L, "asked", 1L));
    }

    private static void count(String run, List<String> lines, Map<String, Long> wanted) throws Exception {
        StreamsBuilder builder = new StreamsBuilder();
        builder.<String, String>stream("lines")
            .flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word)
            .count()
            .toStream()
            .to("counts", Produced.with(Serdes.String(), Serdes.Long()));
        Properties config = new Properties();
        config.put(StreamsConfig.APPLICATION_ID_CONFIG, "words");
        config.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, address);
        config.put(StreamsConfig.STATE_DIR_CONFIG, folder.resolve("state-" + run).toString());
        config.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.String().getClass());
        config.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.String().getClass());
        config.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        config.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 100);
        try (var producer = producer(Map.of())) {
            for (String line : lines) {
                producer.send(new ProducerRecord<>("lines", line));
            }
        }
        var values = with(texts(), Map.of("bootstrap.servers", address, "group.id", "reader-" + run,
            "auto.offset.reset", "earliest", "isolation.level", "read_committed",
            "value.deserializer", LongDeserializer.class.getName()));
        Map<String, Long> counts = new TreeMap<>();
        try (var streams = new KafkaStreams(builder.build(), config);
            var reader = new KafkaConsumer<String, Long>(values)) {
            streams.setUncaughtExceptionHandler(problem -> {
                problem.printStackTrace(System.out);
                return org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
            });
            streams.start();
            reader.subscribe(List.of("counts"));
            until("counted " + counts, () -> {
                check(streams.state() != KafkaStreams.State.ERROR, "streams ended");
                reader.poll(POLL).forEach(one -> {
                    Long before = counts.put(one.key(), one.value());
                    check(before == null || before < one.value(), one); // counted twice, or forgotten
                });
                return wanted.entrySet().stream().allMatch(one -> Objects.equals(counts.get(one.getKey()), one.getValue()));
            });
            // Else the group waits for this member until its session is over.
            streams.close(CloseOptions.groupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP));
        }
    }

    /** A distributed worker takes lines of a file into a topic, exactly once, and out into another file. */
    private static void connect() throws Exception {
        int port;
        try (var free = new ServerSocket(0)) {
            port = free.getLocalPort();
        }
        Path source = folder.resolve("connect-in.txt");
        Path sink = folder.resolve("connect-out.txt");
        Files.writeString(source, "one\ntwo\nthree\n");
        Properties config = new Properties();
        config.putAll(Map.of("bootstrap.servers", address, "group.id", "connect", "listeners", "http://127.0.0.1:" + port,
            "key.converter", "org.apache.kafka.connect.storage.StringConverter",
            "value.converter", "org.apache.kafka.connect.storage.StringConverter",
            "plugin.discovery", "service_load", "exactly.once.source.support", "enabled", "offset.flush.interval.ms", "500"));
        for (String kind : List.of("offset", "config", "status")) {
            config.put(kind + ".storage.topic", "connect-" + kind);
            config.put(kind + ".storage.replication.factor", "1");
        }
        config.putAll(Map.of("offset.storage.partitions", "2", "status.storage.partitions", "2"));
        Path file = folder.resolve("connect.properties");
        try (var writer = Files.newBufferedWriter(file)) {
            config.store(writer, "");
        }
        Thread worker = new Thread(() -> ConnectDistributed.main(new String[] {file.toString()}));
        worker.setDaemon(true);
        worker.start();
        String connectors = "http://127.0.0.1:" + port + "/connectors/";
        until("the worker answers", () -> put(connectors + "lines/config", """
            {"connector.class": "FileStreamSource", "tasks.max": "1", "file": "%s", "topic": "connect-lines",
             "topic.creation.default.partitions": "1", "topic.creation.default.replication.factor": "1"}""".formatted(source)));
        until("the second connector", () -> put(connectors + "copy/config", """
            {"connector.class": "FileStreamSink", "tasks.max": "1", "file": "%s", "topics": "connect-lines",
             "consumer.override.isolation.level": "read_committed"}""".formatted(sink)));
        until("copied", () -> lines(sink).equals(List.of("one", "two", "three")));
        Files.writeString(source, "four\n", StandardOpenOption.APPEND);
        until("copied more", () -> lines(sink).equals(List.of("one", "two", "three", "four")));
        try (var admin = admin()) {
            var topic = new ConfigResource(ConfigResource.Type.TOPIC, "connect-offset");
            check(admin.describeConfigs(List.of(topic)).all().get().get(topic).get("cleanup.policy").value().equals("compact"), "compacted");
        }
    }

    private static boolean put(String address, String body) {
        try {
            var request = HttpRequest.newBuilder(URI.create(address)).header("Content-Type", "application/json")
                .PUT(HttpRequest.BodyPublishers.ofString(body)).build();
            int status = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).statusCode();
            if (status / 100 != 2) {
                sleep(); // it is still joining its group
            }
            return status / 100 == 2;
        } catch (IOException early) {
            sleep();
            return false;
        } catch (InterruptedException stopped) {
            throw new IllegalStateException(stopped);
        }
    }

    private static List<String> lines(Path file) {
        sleep();
        try {
            return Files.exists(file) ? Files.readAllLines(file) : List.of();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static void sleep() {
        try {
            Thread.sleep(100);
        } catch (InterruptedException stopped) {
            throw new IllegalStateException(stopped);
        }
    }

    private static void tool(String name, String... words) throws Exception {
        try {
            Class.forName(name).getMethod("main", String[].class).invoke(null, (Object) words);
        } catch (java.lang.reflect.InvocationTargetException error) {
            if (!(error.getCause() instanceof Ended ended) || ended.status != 0) {
                throw error;
            }
        }
        System.out.flush();
    }

    // -- what the parts share -----------------------------------------------------------------

    private static void create(String topic, int partitions) throws Exception {
        try (var admin = admin()) {
            admin.createTopics(List.of(new NewTopic(topic, partitions, (short) 1))).all().get(30, TimeUnit.SECONDS);
        }
    }

    private static Admin admin() {
        return Admin.create(Map.of("bootstrap.servers", address));
    }

    private static KafkaProducer<String, String> producer(Map<String, Object> more) {
        return new KafkaProducer<>(with(with(texts(), Map.of("bootstrap.servers", address)), more));
    }

    private static KafkaConsumer<String, String> consumer(String group, Map<String, Object> more) {
        return new KafkaConsumer<>(with(with(texts(), Map.of("bootstrap.servers", address, "group.id", group,
            "auto.offset.reset", "earliest", "enable.auto.commit", false, "heartbeat.interval.ms", 200)), more));
    }

    private static Map<String, Object> texts() {
        return Map.of("key.serializer", StringSerializer.class.getName(), "value.serializer", StringSerializer.class.getName(),
            "key.deserializer", StringDeserializer.class.getName(), "value.deserializer", StringDeserializer.class.getName());
    }

    private static Map<String, Object> with(Map<String, Object> some, Map<String, Object> more) {
        Map<String, Object> all = new HashMap<>(some);
        all.putAll(more);
        return all;
    }

    private static String login(String user, String password) {
        return "org.apache.kafka.common.security.plain.PlainLoginModule required username=\"" + user + "\" password=\"" + password + "\";";
    }

    private static List<ConsumerRecord<String, String>> take(KafkaConsumer<String, String> consumer, int count) {
        List<ConsumerRecord<String, String>> found = new ArrayList<>();
        until(count + " records", () -> {
            consumer.poll(POLL).forEach(found::add);
            return found.size() >= count;
        });
        check(found.size() == count, found.size());
        return found;
    }

    private static void until(String what, BooleanSupplier isTrue) {
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
        while (!isTrue.getAsBoolean()) {
            check(System.nanoTime() < end, "it never came to this: " + what);
        }
    }

    private static void check(boolean isTrue, Object what) {
        if (!isTrue) {
            throw new AssertionError(what);
        }
    }
}
