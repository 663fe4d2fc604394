import java.math.BigDecimal;
import java.sql.*;
import java.time.*;
import java.util.*;

/** Asks a server as a tool on JDBC does, and prints what it is told, a line for each thing. */
public class JdbcClient {
    static void rows(String what, ResultSet found, String... columns) throws SQLException {
        while (found.next()) {
            StringBuilder line = new StringBuilder(what);
            for (String column : columns) line.append('|').append(found.getString(column));
            System.out.println(line);
        }
    }

    static void metadata(Connection connection) throws SQLException {
        DatabaseMetaData meta = connection.getMetaData();
        System.out.println("product|" + meta.getDatabaseProductName() + "|" + meta.getDatabaseMajorVersion());
        System.out.println("readonly|" + connection.isReadOnly());
        rows("catalog", meta.getCatalogs(), "TABLE_CAT");
        rows("schema", meta.getSchemas(), "TABLE_SCHEM");
        rows("table", meta.getTables(null, null, "%", new String[] {"TABLE"}), "TABLE_SCHEM", "TABLE_NAME", "TABLE_TYPE");
        rows("column", meta.getColumns(null, "views", "kinds", "%"), "COLUMN_NAME", "TYPE_NAME", "DATA_TYPE", "COLUMN_SIZE", "DECIMAL_DIGITS", "ORDINAL_POSITION");
        rows("key", meta.getPrimaryKeys(null, "views", "kinds"), "COLUMN_NAME", "KEY_SEQ", "PK_NAME");
        rows("index", meta.getIndexInfo(null, "views", "kinds", true, true), "INDEX_NAME", "NON_UNIQUE", "COLUMN_NAME");
        rows("foreign", meta.getImportedKeys(null, "views", "kinds"), "FK_NAME");
        rows("exported", meta.getExportedKeys(null, "views", "kinds"), "FK_NAME");
        rows("function", meta.getFunctions(null, null, "%"), "FUNCTION_NAME");
        rows("procedure", meta.getProcedures(null, null, "%"), "PROCEDURE_NAME");
        rows("privilege", meta.getTablePrivileges(null, "views", "kinds"), "PRIVILEGE");
        rows("version", meta.getVersionColumns(null, "views", "kinds"), "COLUMN_NAME");
        rows("best", meta.getBestRowIdentifier(null, "views", "kinds", DatabaseMetaData.bestRowSession, true), "COLUMN_NAME");
        int types = 0;
        try (ResultSet found = meta.getTypeInfo()) { while (found.next()) types++; }
        System.out.println("types|" + (types > 10));
        System.out.println("keywords|" + (meta.getSQLKeywords().length() > 0));
    }

    static void values(Connection connection) throws SQLException {
        // Often enough that the driver prepares by name, and takes values in binary form.
        try (PreparedStatement ask = connection.prepareStatement("SELECT * FROM kinds WHERE id >= ? ORDER BY id")) {
            for (int round = 0; round < 8; round++) {
                ask.setInt(1, 1);
                try (ResultSet found = ask.executeQuery()) {
                    while (found.next()) {
                        byte[] raw = found.getBytes("raw");
                        OffsetDateTime moment = found.getObject("moment", OffsetDateTime.class);
                        BigDecimal exact = found.getBigDecimal("exact");
                        Object number = found.getObject("number");
                        if (round == 0 || round == 7) System.out.println("row" + round + "|" + found.getObject("id") + "|" + found.getObject("whole") + "|"
                            + number + "|" + (exact == null ? null : exact.toPlainString()) + "|" + found.getString("text") + "|"
                            + found.getObject("flag") + "|" + (moment == null ? null : moment.toInstant()) + "|" + found.getObject("day", LocalDate.class) + "|"
                            + (raw == null ? null : HexFormat.of().formatHex(raw)) + "|" + found.getString("nested"));
                    }
                }
            }
        }
        try (PreparedStatement ask = connection.prepareStatement(
                "SELECT ?::BIGINT AS a, ?::VARCHAR AS b, ?::DECIMAL(38,9) AS c, ?::TIMESTAMPTZ AS d, ?::DATE AS e, ?::BLOB AS f, ?::BOOLEAN AS g, ?::DOUBLE AS h, ?::UUID AS i, list_sum(?) AS j")) {
            for (int round = 0; round < 7; round++) {
                ask.setLong(1, Long.MIN_VALUE);
                ask.setString(2, "it's \\ \" ; -- /* é");
                ask.setBigDecimal(3, new BigDecimal("-12345678901234567890.000000001"));
                ask.setObject(4, OffsetDateTime.of(2026, 3, 29, 1, 30, 0, 123456000, ZoneOffset.ofHours(2)));
                ask.setObject(5, LocalDate.of(1999, 12, 31));
                ask.setBytes(6, new byte[] {0, 39, -1});
                ask.setBoolean(7, true);
                ask.setDouble(8, -0.1);
                ask.setObject(9, UUID.fromString("00112233-4455-6677-8899-aabbccddeeff"));
                ask.setArray(10, connection.createArrayOf("int8", new Long[] {1L, 2L, 39L}));
                try (ResultSet found = ask.executeQuery()) {
                    found.next();
                    if (round == 6) System.out.println("given|" + found.getLong(1) + "|" + found.getString(2) + "|" + found.getBigDecimal(3).toPlainString() + "|"
                        + found.getObject(4, OffsetDateTime.class).toInstant() + "|" + found.getObject(5, LocalDate.class) + "|" + HexFormat.of().formatHex(found.getBytes(6)) + "|"
                        + found.getBoolean(7) + "|" + found.getDouble(8) + "|" + found.getObject(9) + "|" + found.getBigDecimal(10).toPlainString());
                }
            }
        }
        try (PreparedStatement ask = connection.prepareStatement("SELECT ?::INT IS NULL AS a, ? IS NULL AS b")) {
            ask.setNull(1, Types.INTEGER);
            ask.setNull(2, Types.VARCHAR);
            ResultSetMetaData meta = ask.getMetaData();
            System.out.println("described|" + meta.getColumnCount() + "|" + meta.getColumnTypeName(1) + "|" + ask.getParameterMetaData().getParameterCount());
            try (ResultSet found = ask.executeQuery()) { rows("nulls", found, "a", "b"); }
        }
        try (ResultSet found = connection.createStatement().executeQuery("SELECT [1, NULL, 3] AS a, ['x', 'y,\"'] AS b, {'k': 1} AS c")) {
            found.next();
            System.out.println("lists|" + Arrays.toString((Object[]) found.getArray(1).getArray()) + "|" + Arrays.toString((Object[]) found.getArray(2).getArray()) + "|" + found.getString(3));
        }
    }

    static void cursors(Connection connection) throws SQLException {
        connection.setAutoCommit(false);
        long sum = 0;
        int count = 0;
        try (Statement ask = connection.createStatement()) {
            ask.setFetchSize(100);
            try (ResultSet found = ask.executeQuery("SELECT range AS n FROM range(1000)")) {
                while (found.next()) { sum += found.getLong("n"); count++; }
            }
        }
        connection.commit();
        System.out.println("fetched|" + count + "|" + sum);
        try (Statement ask = connection.createStatement()) {
            ask.executeQuery("SELECT * FROM nothing_there");
        } catch (SQLException error) {
            System.out.println("error|" + error.getSQLState());
        }
        try (Statement ask = connection.createStatement()) {
            ask.executeQuery("SELECT 1");
        } catch (SQLException error) {
            System.out.println("failed|" + error.getSQLState());
        }
        connection.rollback();
        connection.setAutoCommit(true);
        try (Statement ask = connection.createStatement()) {
            ask.setQueryTimeout(1);
            ask.executeQuery("SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range = -1");
        } catch (SQLException error) {
            System.out.println("cancelled|" + error.getSQLState());
        }
        try (Statement ask = connection.createStatement()) {
            ask.executeUpdate("DELETE FROM kinds");
        } catch (SQLException error) {
            System.out.println("refused|" + error.getSQLState());
        }
        System.out.println("valid|" + connection.isValid(60));
    }

    public static void main(String[] arguments) throws Exception {
        TimeZone.setDefault(TimeZone.getTimeZone("America/New_York"));
        try (Connection connection = DriverManager.getConnection(arguments[0], arguments[1], arguments[2])) {
            metadata(connection);
            values(connection);
            cursors(connection);
        }
    }
}
