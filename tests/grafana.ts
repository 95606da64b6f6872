// What Grafana's own types say of a dashboard; the test appends the dashboards to this, as literals.
import type { Dashboard, Panel, RowPanel } from '@grafana/schema';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON has no enums: a text stands for the one that has its value.
type Json<T> = T extends string
  ? string extends T
    ? string
    : `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends Array<infer U>
      ? Array<Json<U>>
      : T extends object
        ? { [K in keyof T]: Json<T[K]> }
        : T;

// The type of all panels leaves open what is special to each kind.
type FieldConfig = NonNullable<Panel['fieldConfig']>;
type Drawn<Kind, Options, Custom> = Omit<Json<Panel>, 'type' | 'options' | 'fieldConfig'> & {
  type: Kind;
  options: Json<Options>;
  fieldConfig: Omit<Json<FieldConfig>, 'defaults'> & {
    defaults: Omit<Json<FieldConfig['defaults']>, 'custom'> & { custom?: Json<Custom> };
  };
};
type Drawing =
  | Drawn<'timeseries', timeseries.Options, timeseries.FieldConfig>
  | Drawn<'stat', stat.Options, Record<string, never>>
  | Drawn<'bargauge', bargauge.Options, Record<string, never>>
  | Drawn<'table', table.Options, table.FieldConfig>;
type Whole = Omit<Json<Dashboard>, 'panels'> & { panels: Array<Json<RowPanel> | Drawing> };

