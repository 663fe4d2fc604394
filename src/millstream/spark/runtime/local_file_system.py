"""A faster local file system: a small class that is compiled in Spark's JVM, as no setting can replace it.

Janino, which is part of Spark, compiles it. If it does not fit this Spark, only speed is lost: the session
goes on without it, and its log says why. Like ``internals.py``, this depends on private names of Spark, and
tests with a real JVM cover it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Hadoop's own local file system starts `chmod` for every file that it creates: a quarter of the
# time of a small batch. This one sets permissions by a system call. Anything but the nine usual
# bits goes the old way.
_LOCAL_FILES = """
import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

public class LocalFilesWithoutFork extends LocalFileSystem {
  public static class Raw extends RawLocalFileSystem {
    public void setPermission(Path path, FsPermission wanted) throws IOException {
      if (wanted.getStickyBit()) {
        super.setPermission(path, wanted);
      } else {
        String bits = wanted.getUserAction().SYMBOL + wanted.getGroupAction().SYMBOL
            + wanted.getOtherAction().SYMBOL;
        Files.setPosixFilePermissions(
            pathToFile(path).toPath(), PosixFilePermissions.fromString(bits));
      }
    }
  }

  public LocalFilesWithoutFork() { super(new Raw()); }

  public static void install(Configuration conf) throws Exception {
    URI root = URI.create("file:///");
    FileSystem files = new LocalFilesWithoutFork();
    files.initialize(root, conf);
    java.lang.reflect.Method put = FileSystem.class.getDeclaredMethod(
        "addFileSystemForTesting",
        new Class[] {URI.class, Configuration.class, FileSystem.class});
    put.setAccessible(true);
    put.invoke(null, new Object[] {root, conf, files});
  }
}
"""


def install_local_files(spark: SparkSession) -> None:
    """Install a file system for ``file:`` that starts no processes in the JVM of a session, which is the driver's.

    It replaces the one in Hadoop's cache of file systems.
    """
    context: Any = spark.sparkContext
    conf = context._jsc.hadoopConfiguration()  # noqa: SLF001
    kind = "org.apache.hadoop.conf.Configuration"
    _install(context, "LocalFilesWithoutFork", _LOCAL_FILES, {kind: conf})


def _install(context: Any, name: str, source: str, arguments: dict[str, Any]) -> None:
    """Compile a class and call its ``install`` with arguments, given by their kinds."""
    jvm, gateway = context._jvm, context._gateway  # noqa: SLF001
    try:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(source)
        made = compiler.getClassLoader().loadClass(name)
        kinds = gateway.new_array(jvm.java.lang.Class, len(arguments))
        values = gateway.new_array(jvm.java.lang.Object, len(arguments))
        for number, (kind, value) in enumerate(arguments.items()):
            kinds[number] = jvm.java.lang.Class.forName(kind)
            values[number] = value
        made.getMethod("install", kinds).invoke(None, values)
    except Exception as problem:  # noqa: BLE001 - after any failure the session goes on without
        spark_log = jvm.org.slf4j.LoggerFactory.getLogger(f"millstream.{name}")
        spark_log.warn("going on without: " + str(problem))
