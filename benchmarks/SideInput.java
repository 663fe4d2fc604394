import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.LookupTableSource;
import org.apache.flink.table.connector.source.lookup.LookupFunctionProvider;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.factories.DynamicTableFactory;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.functions.FunctionContext;
import org.apache.flink.table.functions.LookupFunction;

/** The connector "side-input": keys 0 to 9,999 with their values, looked up in a hash map. */
public final class SideInput implements DynamicTableSourceFactory, LookupTableSource {
    private static final long ROWS = 10_000;

    @Override
    public String factoryIdentifier() {
        return "side-input";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return Collections.emptySet();
    }

    @Override
    public Set<ConfigOption<?>> optionalOptions() {
        return Collections.emptySet();
    }

    @Override
    public DynamicTableSource createDynamicTableSource(DynamicTableFactory.Context context) {
        return new SideInput();
    }

    @Override
    public LookupRuntimeProvider getLookupRuntimeProvider(LookupContext context) {
        return LookupFunctionProvider.of(new Lookup());
    }

    @Override
    public DynamicTableSource copy() {
        return new SideInput();
    }

    @Override
    public String asSummaryString() {
        return "side input";
    }

    /** Looks a key up. */
    public static final class Lookup extends LookupFunction {
        private transient Map<Long, Collection<RowData>> rows;

        @Override
        public void open(FunctionContext context) {
            rows = new HashMap<>();
            for (long key = 0; key < ROWS; key++) {
                RowData row = GenericRowData.of(key, StringData.fromString("value " + key));
                rows.put(key, Collections.singletonList(row));
            }
        }

        @Override
        public Collection<RowData> lookup(RowData key) {
            return rows.getOrDefault(key.getLong(0), Collections.emptyList());
        }
    }
}
