// What kafkajs does with a broker, part by part: the name of each, and "ok" or what went wrong.
//
// Called with the folder of kafkajs, the address of a broker, and the address, certificate, user and
// password of a broker that asks for them.
const fs = require("fs");
const assert = require("assert");

const [library, address, secureAddress, certificate, username, password] = process.argv.slice(2);
const { Kafka, CompressionTypes, logLevel } = require(`${library}/node_modules/kafkajs`);

const kafka = new Kafka({ clientId: "kafkajs", brokers: [address], logLevel: logLevel.NOTHING });
const tls = { ca: [fs.readFileSync(certificate)] };

function secure(given) {
  return new Kafka({
    brokers: [secureAddress],
    ssl: tls,
    sasl: { mechanism: "plain", username, password: given },
    logLevel: logLevel.NOTHING,
    retry: { retries: 0 },
  });
}

async function within(client, work) {
  await client.connect();
  try {
    return await work(client);
  } finally {
    await client.disconnect();
  }
}

const create = (topic, numPartitions) =>
  within(kafka.admin(), (admin) => admin.createTopics({ topics: [{ topic, numPartitions }] }));

function take(consumer, count) {
  return new Promise((resolve, reject) => {
    const found = [];
    setTimeout(() => reject(new Error(`only ${found.length} of ${count} records`)), 60000).unref();
    consumer
      .run({
        eachMessage: async ({ partition, message }) => {
          found.push({ partition, key: `${message.key}`, value: `${message.value}`, headers: message.headers });
          if (found.length === count) resolve(found);
        },
      })
      .catch(reject);
  });
}

const settings = (groupId) => ({ groupId, heartbeatInterval: 300, sessionTimeout: 6000, maxWaitTimeInMs: 200 });

const parts = {
  async records() {
    await create("node-records", 2);
    const sent = [];
    await within(kafka.producer({ idempotent: true }), async (producer) => {
      for (const compression of [CompressionTypes.None, CompressionTypes.GZIP]) {
        const messages = Array.from({ length: 500 }, (_, number) => ({
          key: `key${number % 5}`,
          value: `${compression}-${number}`,
          headers: { a: "1" },
        }));
        sent.push(...messages.map((one) => one.value));
        await producer.send({ topic: "node-records", compression, messages });
      }
    });
    await within(kafka.consumer(settings("node")), async (consumer) => {
      await consumer.subscribe({ topic: "node-records", fromBeginning: true });
      const found = await take(consumer, sent.length);
      assert.deepStrictEqual(found.map((one) => one.value).sort(), [...sent].sort());
      for (let key = 0; key < 5; key++) { // in the order in which they were sent
        const values = found.filter((one) => one.key === `key${key}`).map((one) => one.value);
        assert.deepStrictEqual(values, sent.filter((one) => one.split("-")[1] % 5 === key));
      }
      assert.strictEqual(`${found[0].headers.a}`, "1");
    });
    await within(kafka.admin(), async (admin) => {
      const [{ partitions }] = await admin.fetchOffsets({ groupId: "node", topics: ["node-records"] });
      assert.strictEqual(partitions.reduce((sum, one) => sum + Number(one.offset), 0), sent.length);
    });
  },

  async transactions() {
    await create("node-out", 1);
    await within(kafka.producer({ transactionalId: "node", idempotent: true, maxInFlightRequests: 1 }), async (producer) => {
      for (const end of ["commit", "abort", "commit"]) {
        const transaction = await producer.transaction();
        await transaction.send({ topic: "node-out", messages: [{ value: end }] });
        await transaction.sendOffsets({
          consumerGroupId: "node-txn",
          topics: [{ topic: "node-out", partitions: [{ partition: 0, offset: "5" }] }],
        });
        await transaction[end]();
      }
    });
    await within(kafka.consumer({ ...settings("node-committed"), readUncommitted: false }), async (consumer) => {
      await consumer.subscribe({ topic: "node-out", fromBeginning: true });
      assert.deepStrictEqual((await take(consumer, 2)).map((one) => one.value), ["commit", "commit"]);
    });
  },

  async administration() {
    await create("node-admin", 1);
    await within(kafka.admin(), async (admin) => {
      await admin.createPartitions({ topicPartitions: [{ topic: "node-admin", count: 3 }] });
      const { topics } = await admin.fetchTopicMetadata({ topics: ["node-admin"] });
      assert.strictEqual(topics[0].partitions.length, 3);
      assert.strictEqual((await admin.describeCluster()).brokers.length, 1);
      assert.ok((await admin.listGroups()).groups.some((one) => one.groupId === "node"));
      assert.strictEqual((await admin.describeGroups(["node"])).groups[0].state, "Empty");
      await admin.deleteGroups(["node"]);
      await admin.deleteTopics({ topics: ["node-admin"] });
      assert.ok(!(await admin.listTopics()).includes("node-admin"));
    });
  },

  async password() {
    await within(secure(password).admin(), (admin) =>
      admin.createTopics({ topics: [{ topic: "node-secure" }] }));
    await within(secure(password).producer(), (producer) =>
      producer.send({ topic: "node-secure", messages: [{ value: "x" }] }));
    await assert.rejects(secure("wrong").admin().connect(), /unknown user or wrong password/);
  },
};

(async () => {
  console.log(`version\t${require(`${library}/node_modules/kafkajs/package.json`).version}`);
  for (const [name, part] of Object.entries(parts)) {
    const began = Date.now();
    const outcome = await part().then(() => "ok", (error) => `${error.stack}`.replace(/\n/g, " | "));
    console.log(`${name}\t${outcome}\t${Date.now() - began}`);
  }
  process.exit(0);
})();
