// What franz-go does with a broker, part by part: the name of each, and "ok" or what went wrong.
//
// Called with the address of a broker, and the address, certificate, user and password of a broker
// that asks for them.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
)

var (
	address, secureAddress, certificate, user, password string

	all = context.Background()
)

func client(more ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(address)}, more...)...)
}

func create(topic string, partitions int32) error {
	made, err := client()
	if err != nil {
		return err
	}
	defer made.Close()
	found, err := kadm.NewClient(made).CreateTopic(all, partitions, 1, nil, topic)
	return errors.Join(err, found.Err)
}

// take returns so many records, in the order in which they came.
func take(reader *kgo.Client, count int) ([]*kgo.Record, error) {
	var found []*kgo.Record
	within, cancel := context.WithTimeout(all, time.Minute)
	defer cancel()
	for len(found) < count {
		fetches := reader.PollFetches(within)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("%d of %d records: %w", len(found), count, err)
		}
		found = append(found, fetches.Records()...)
	}
	if len(found) != count {
		return nil, fmt.Errorf("%d records, and %d were sent", len(found), count)
	}
	return found, nil
}

func records() error {
	if err := create("go-records", 3); err != nil {
		return err
	}
	codecs := []kgo.CompressionCodec{
		kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression(),
	}
	next := map[string]int{}
	number := 0
	for _, codec := range codecs {
		sender, err := client(kgo.ProducerBatchCompression(codec))
		if err != nil {
			return err
		}
		for range 300 {
			key := "key" + strconv.Itoa(number%7)
			sender.Produce(all, &kgo.Record{
				Topic: "go-records", Key: []byte(key), Value: []byte(strconv.Itoa(number)),
				Headers: []kgo.RecordHeader{{Key: "a", Value: []byte("1")}},
			}, nil)
			number++
		}
		if err := sender.Flush(all); err != nil {
			return err
		}
		sender.Close()
	}
	group := []kgo.Opt{kgo.ConsumerGroup("go"), kgo.ConsumeTopics("go-records"), kgo.DisableAutoCommit()}
	reader, err := client(group...)
	if err != nil {
		return err
	}
	found, err := take(reader, number)
	if err != nil {
		return err
	}
	for _, one := range found { // of each key in the order in which they were sent
		key := string(one.Key)
		first, _ := strconv.Atoi(strings.TrimPrefix(key, "key"))
		if want := strconv.Itoa(first + 7*next[key]); string(one.Value) != want {
			return fmt.Errorf("%s of %s; %s was sent", one.Value, key, want)
		}
		next[key]++
		if string(one.Headers[0].Value) != "1" {
			return errors.New("a header is not what was sent")
		}
	}
	if err := reader.CommitRecords(all, found...); err != nil {
		return err
	}
	admin := kadm.NewClient(reader)
	lags, err := admin.Lag(all, "go")
	if err != nil {
		return err
	}
	if lag := lags["go"].Lag.Total(); lag != 0 {
		return fmt.Errorf("a lag of %d", lag)
	}
	reader.Close()
	return nil
}

// transactions reads from one topic and writes to another, each record once; one round is taken back.
func transactions() error {
	if err := errors.Join(create("go-in", 1), create("go-out", 1)); err != nil {
		return err
	}
	sender, err := client()
	if err != nil {
		return err
	}
	for number := range 30 {
		sender.Produce(all, &kgo.Record{Topic: "go-in", Value: []byte(strconv.Itoa(number))}, nil)
	}
	if err := sender.Flush(all); err != nil {
		return err
	}
	sender.Close()
	for _, end := range []kgo.TransactionEndTry{kgo.TryAbort, kgo.TryCommit} {
		session, err := kgo.NewGroupTransactSession(kgo.SeedBrokers(address), kgo.TransactionalID("go"),
			kgo.ConsumerGroup("go-txn"), kgo.ConsumeTopics("go-in"), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
		if err != nil {
			return err
		}
		if err := session.Begin(); err != nil {
			return err
		}
		found, err := take(session.Client(), 30)
		if err != nil {
			return err
		}
		for _, one := range found {
			session.Produce(all, &kgo.Record{Topic: "go-out", Value: one.Value}, nil)
		}
		committed, err := session.End(all, end)
		if err != nil || committed != bool(end) {
			return fmt.Errorf("ended as %v: %w", committed, err)
		}
		session.Close()
	}
	reader, err := client(kgo.ConsumeTopics("go-out"), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return err
	}
	defer reader.Close()
	_, err = take(reader, 30)
	return err
}

func administration() error {
	if err := create("go-admin", 1); err != nil {
		return err
	}
	made, err := client()
	if err != nil {
		return err
	}
	defer made.Close()
	admin := kadm.NewClient(made)
	if _, err := admin.UpdatePartitions(all, 3, "go-admin"); err != nil {
		return err
	}
	ends, err := admin.ListEndOffsets(all, "go-admin")
	if err != nil || len(ends["go-admin"]) != 3 {
		return fmt.Errorf("ends %v: %w", ends, err)
	}
	hour := "3600000"
	altered, err := admin.AlterTopicConfigs(all, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.ms", Value: &hour}}, "go-admin")
	if err != nil || altered[0].Err != nil {
		return errors.Join(err, altered[0].Err)
	}
	configs, err := admin.DescribeTopicConfigs(all, "go-admin")
	if err != nil {
		return err
	}
	for _, one := range configs[0].Configs {
		if one.Key == "retention.ms" && one.MaybeValue() != hour {
			return fmt.Errorf("%s is %s", one.Key, one.MaybeValue())
		}
	}
	groups, err := admin.DescribeGroups(all, "go")
	if err != nil || groups["go"].State != "Empty" {
		return fmt.Errorf("group %v: %w", groups["go"].State, err)
	}
	if _, err := admin.DeleteGroups(all, "go"); err != nil {
		return err
	}
	if _, err := admin.DeleteTopics(all, "go-admin"); err != nil {
		return err
	}
	topics, err := admin.ListTopics(all)
	if err != nil || topics.Has("go-admin") {
		return fmt.Errorf("topics %v: %w", topics.Names(), err)
	}
	return nil
}

func withPassword() error {
	data, err := os.ReadFile(certificate)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(data)
	for _, given := range []string{password, "wrong"} {
		made, err := kgo.NewClient(kgo.SeedBrokers(secureAddress), kgo.DialTLSConfig(&tls.Config{RootCAs: roots}),
			kgo.SASL(plain.Auth{User: user, Pass: given}.AsMechanism()), kgo.RequestRetries(0))
		if err != nil {
			return err
		}
		defer made.Close()
		err = made.Ping(all)
		if given == password && err != nil {
			return err
		}
		if given != password && !errors.Is(err, kerr.SaslAuthenticationFailed) {
			return fmt.Errorf("a wrong password was answered with %w", err)
		}
	}
	return nil
}

// version returns which franz-go was built in.
func version() string {
	build, _ := debug.ReadBuildInfo()
	for _, one := range build.Deps {
		if one.Path == "github.com/twmb/franz-go" {
			return one.Version
		}
	}
	return "not told"
}

func main() {
	address, secureAddress, certificate, user, password = os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]
	fmt.Printf("version\t%s\n", version())
	for _, part := range []struct {
		name string
		run  func() error
	}{
		{"records", records},
		{"transactions", transactions},
		{"administration", administration},
		{"password", withPassword},
	} {
		outcome := "ok"
		began := time.Now()
		if err := part.run(); err != nil {
			outcome = strings.ReplaceAll(err.Error(), "\n", " | ")
		}
		fmt.Printf("%s\t%s\t%d\n", part.name, outcome, time.Since(began).Milliseconds())
	}
}
