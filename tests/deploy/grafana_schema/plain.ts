// Grafana's types as those of JSON: an enum is the text (or number) of its members.
import type { AnnotationQuery, Dashboard } from '@grafana/schema';
import type * as barchart from '@grafana/schema/dist/esm/raw/composable/barchart/panelcfg/x/BarChartPanelCfg_types.gen';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

export type Plain<T> = 0 extends 1 & T
  ? T // any
  : T extends string
    ? `${T}`
    : T extends Array<infer Item>
      ? Array<Plain<Item>>
      : T extends object
        ? { [Key in keyof T]: Plain<T[Key]> }
        : T;

// What the Prometheus data source reads of an annotation; the schema knows data sources' fields no better than that.
type PrometheusAnnotation = AnnotationQuery & {
  expr: string;
  step?: string;
  textFormat?: string;
  titleFormat?: string;
};

export type PlainDashboard = Plain<
  Omit<Dashboard, 'annotations'> & { annotations: { list: PrometheusAnnotation[] } }
>;

export interface PlainOptions {
  barchart: Plain<barchart.Options>;
  heatmap: Plain<heatmap.Options>;
  stat: Plain<stat.Options>;
  table: Plain<table.Options>;
  timeseries: Plain<timeseries.Options>;
}

// `stat` has no fields of its own in `custom`.
export interface PlainCustom {
  barchart: Plain<barchart.FieldConfig>;
  heatmap: Plain<heatmap.FieldConfig>;
  stat: Record<string, never>;
  table: Plain<table.FieldConfig>;
  timeseries: Plain<timeseries.FieldConfig>;
}
