//! The exporter of spans. It corrects what `tracing` cannot express, and reports a collector that cannot be
//! reached when the failure starts and when it is over, not with each batch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::{Array, StringValue, Value};
use opentelemetry_otlp::SpanExporter as OtlpExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

/// This attribute is a list in the conventions; fields of `tracing` are single values.
const FINISH_REASONS: &str = "gen_ai.response.finish_reasons";

/// An exporter of spans to a collector, which logs when the collector fails and when it accepts spans again.
#[derive(Debug)]
pub(super) struct CollectorExporter {
    inner: OtlpExporter,
    endpoint: String,
    /// Whether the last batch failed.
    is_failing: AtomicBool,
}

impl CollectorExporter {
    /// Wraps the exporter that sends to `endpoint`.
    pub fn new(inner: OtlpExporter, endpoint: String) -> Self {
        CollectorExporter { inner, endpoint, is_failing: AtomicBool::new(false) }
    }

    fn report(&self, result: &OTelSdkResult) {
        let endpoint = &self.endpoint;
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match result {
            // The end of the process, not the collector, stopped these.
            Err(OTelSdkError::AlreadyShutdown) => {}
            Err(error) if !was_failing => tracing::warn!(
                endpoint,
                "traces are lost until the collector accepts them: {error}; is it running, and is this its OTLP/HTTP address?"
            ),
            Ok(()) if was_failing => tracing::info!(endpoint, "the collector accepts traces again"),
            _ => {}
        }
    }
}

impl SpanExporter for CollectorExporter {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        batch.iter_mut().for_each(list_finish_reasons);
        let result = self.inner.export(batch).await;
        self.report(&result);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

fn list_finish_reasons(span: &mut SpanData) {
    for attribute in span.attributes.iter_mut().filter(|attribute| attribute.key.as_str() == FINISH_REASONS) {
        if let Value::String(reason) = &attribute.value {
            let reasons: Vec<StringValue> = vec![reason.clone()];
            attribute.value = Value::Array(Array::String(reasons));
        }
    }
}
