//! A trace of one node, as the body of a request to a collector: OTLP's JSON.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use uuid::Uuid;
use vmove_types::report::PhaseTime;

/// `SPAN_KIND_INTERNAL` of OTLP.
const INTERNAL: u8 = 1;
const STATUS_OK: u8 = 1;
const STATUS_ERROR: u8 = 2;

/// An id of a span: eight bytes, in hexadecimal digits.
pub(super) type SpanId = String;

/// What was done, and when: milliseconds after the trace's begin.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) name: &'a str,
    pub(super) start_ms: f64,
    pub(super) length_ms: f64,
}

impl<'a> From<&'a PhaseTime> for Step<'a> {
    fn from(phase: &'a PhaseTime) -> Self {
        Self { name: &phase.name, start_ms: phase.start_ms, length_ms: phase.duration_ms }
    }
}

fn any_span() -> SpanId {
    Uuid::new_v4().simple().to_string()[..16].to_owned()
}

fn failure(message: &str) -> Value {
    json!({ "code": STATUS_ERROR, "message": message })
}

/// Spans of one node.
pub(super) struct Trace {
    id: Uuid,
    begin: SystemTime,
    spans: Vec<Value>,
}

impl Trace {
    /// `None`: its begin is not known any more.
    pub(super) fn begin(id: Uuid, began_at: Option<&str>) -> Option<Self> {
        let begin = humantime::parse_rfc3339(began_at?).ok()?;
        Some(Self { id, begin, spans: Vec::new() })
    }

    fn at(&self, ms: f64) -> String {
        let time = self.begin + Duration::from_secs_f64(ms.max(0.0) / 1e3);
        time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
    }

    fn add(&mut self, span: SpanId, parent: Option<&str>, step: Step<'_>, more: Value) -> SpanId {
        let end = step.start_ms + step.length_ms;
        let mut told = json!({
            "traceId": self.id.simple().to_string(), "spanId": span, "name": step.name, "kind": INTERNAL,
            "startTimeUnixNano": self.at(step.start_ms), "endTimeUnixNano": self.at(end),
        });
        if let Some(parent) = parent {
            told["parentSpanId"] = parent.into();
        }
        if let (Value::Object(told), Value::Object(more)) = (&mut told, more) {
            told.extend(more);
        }
        self.spans.push(told);
        span
    }

    /// The first span of this node. What went wrong, if something has.
    pub(super) fn root(
        &mut self,
        span: SpanId,
        parent: Option<&str>,
        (name, length_ms): (&str, f64),
        attributes: &[Value],
        error: Option<&str>,
    ) -> SpanId {
        let status = error.map_or(json!({ "code": STATUS_OK }), failure);
        let step = Step { name, start_ms: 0.0, length_ms };
        self.add(span, parent, step, json!({ "attributes": attributes, "status": status }))
    }

    /// A span below another.
    pub(super) fn below(&mut self, parent: &str, step: Step<'_>) -> SpanId {
        self.add(any_span(), Some(parent), step, Value::Null)
    }

    /// The same, with an error.
    pub(super) fn failed_below(&mut self, parent: &str, step: Step<'_>, error: &str) {
        self.add(any_span(), Some(parent), step, json!({ "status": failure(error) }));
    }

    /// Phases or steps that begin `after_ms`.
    pub(super) fn all_below(&mut self, parent: &str, phases: &[PhaseTime], after_ms: f64) {
        for phase in phases {
            let step = Step::from(phase);
            self.below(parent, Step { start_ms: after_ms + step.start_ms, ..step });
        }
    }

    /// The body of a request.
    pub(super) fn of_node(self, node: &str) -> Value {
        let resource = [
            text("service.name", "vmoved"),
            text("service.version", env!("CARGO_PKG_VERSION")),
            text("host.name", node),
        ];
        json!({ "resourceSpans": [{
            "resource": { "attributes": resource },
            "scopeSpans": [{ "scope": { "name": "vmove" }, "spans": self.spans }],
        }] })
    }
}

pub(super) fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

pub(super) fn number(key: &str, value: f64) -> Value {
    json!({ "key": key, "value": { "doubleValue": value } })
}

/// Whole numbers are texts in OTLP's JSON.
pub(super) fn count(key: &str, value: u64) -> Value {
    json!({ "key": key, "value": { "intValue": value.to_string() } })
}

/// Of what was told for a collector.
#[cfg(test)]
pub(super) fn spans_in(told: &Value) -> Vec<Value> {
    told["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().expect("spans").clone()
}
