"""The command line of an executor in a pod, from what Spark puts into the pod's environment."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed here")
import pyspark

from millstream.errors import ConfigError
from millstream.spark.runtime.java import Java
from millstream.spark.runtime.kubernetes_executor import executor_command

JAVA = Java(Path("/jdk"), Path("/jdk/bin/java"), "21", "JAVA_HOME")
# Of a pod that Spark 4.3 created, less what Kubernetes adds.
ENV = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.4:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-application-1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.5",
    "SPARK_EXECUTOR_POD_NAME": "ads-exec-3",
    "SPARK_CONF_DIR": "/opt/spark/conf",
    **{f"SPARK_JAVA_OPT_{n}": f"-Doption={n}" for n in (10, 9, 0)},
}


def test_the_backend_gets_what_spark_has_put_into_the_environment():
    java, *options = executor_command(ENV, JAVA)
    at = options.index("org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend")
    given = options[at + 1 :]
    assert java == "/jdk/bin/java"
    assert dict(zip(given[::2], given[1::2], strict=True)) == {
        "--driver-url": "spark://CoarseGrainedScheduler@10.0.0.4:7078",
        "--executor-id": "3",
        "--cores": "2",
        "--app-id": "spark-application-1",
        "--hostname": "10.0.0.5",
        "--resourceProfileId": "0",
        "--podName": "ads-exec-3",
    }
    assert options[: at - 2] == [
        *(f"-Doption={n}" for n in (0, 9, 10)),
        "-Xms1024m",
        "-Xmx1024m",
    ]


def test_sparks_settings_come_before_its_jars():
    options = executor_command(ENV | {"SPARK_EXTRA_CLASSPATH": "/more/*"}, JAVA)
    jars = f"{Path(pyspark.__file__).parent}/jars/*"
    assert options[options.index("-cp") + 1] == f"/opt/spark/conf:{jars}:/more/*"


def test_by_hand_it_says_who_starts_it():
    lacking = {name: value for name, value in ENV.items() if "EXECUTOR_ID" not in name}
    with pytest.raises(ConfigError, match=r"lacks SPARK_EXECUTOR_ID. Spark sets them.*k8s://"):
        executor_command(lacking, JAVA)
