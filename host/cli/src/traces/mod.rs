//! Traces, sent over OTLP/HTTP to an OpenTelemetry collector. They are off unless an endpoint is configured.
//!
//! The other crates only open spans with `tracing`, whose fields have OpenTelemetry's names; only this module
//! knows how they leave the process. A collector that does not answer costs a warning and the spans, never a
//! request.

mod export;

use std::time::Duration;

use anyhow::{Context as _, Result};
use opentelemetry::KeyValue;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_otlp::{Protocol, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{BatchSpanProcessor, SdkTracerProvider};
use reqwest::header::HeaderMap;
use skep_gateway::RemoteParent;
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt as _};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

use crate::failure::Usage;
use export::CollectorExporter;

const TRACES_PATH: &str = "/v1/traces";
const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const SERVICE_VARIABLE: &str = "OTEL_SERVICE_NAME";
/// Maximum time for the last spans to reach the collector once the host has stopped.
const FLUSH_DEADLINE: Duration = Duration::from_secs(5);

/// Destination of traces, and the name of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceOptions {
    /// Address of the collector, including the path.
    endpoint: String,
    /// `None` uses the name in `OTEL_RESOURCE_ATTRIBUTES`, or `skep`.
    service: Option<String>,
}

/// The running export. It has to be shut down after the last span has ended.
pub struct Traces {
    provider: SdkTracerProvider,
}

impl TraceOptions {
    /// Reads the options. `endpoint` is a collector's base address and takes precedence over the standard
    /// environment variables; the result is `None` if neither names one.
    pub fn read(
        endpoint: Option<&str>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<TraceOptions>> {
        let variable = |name| environment(name).filter(|value| !value.is_empty());
        let endpoint = if let Some(base) = endpoint {
            checked("--otlp-endpoint or [telemetry] otlp_endpoint", base, TRACES_PATH)?
        } else if let Some(whole) = variable(TRACES_ENDPOINT_VARIABLE) {
            checked(TRACES_ENDPOINT_VARIABLE, &whole, "")?
        } else if let Some(base) = variable(ENDPOINT_VARIABLE) {
            checked(ENDPOINT_VARIABLE, &base, TRACES_PATH)?
        } else {
            return Ok(None);
        };
        Ok(Some(TraceOptions { endpoint, service: variable(SERVICE_VARIABLE) }))
    }
}

/// Returns the address of the collector's route for traces. `source` says where `given` comes from.
fn checked(source: &str, given: &str, path: &str) -> Result<String> {
    const HINT: &str = "\n  hint: give the OTLP/HTTP address of a collector, such as http://127.0.0.1:4318";
    let fault = match reqwest::Url::parse(given) {
        Ok(url) if url.scheme() == "http" && url.has_host() => None,
        Ok(url) if url.scheme() == "https" => {
            Some("traces are sent over plain http; a collector beside the host can forward them encrypted")
        }
        _ => Some("it is not an http:// address"),
    };
    if let Some(fault) = fault {
        return Err(Usage(format!("{source} is {given:?}: {fault}{HINT}")).into());
    }
    Ok(format!("{}{path}", given.trim_end_matches('/')))
}

impl Traces {
    /// Starts the thread that sends spans.
    pub fn start(options: &TraceOptions) -> Result<Traces> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&options.endpoint)
            .build()
            .with_context(|| format!("cannot send traces to {}", options.endpoint))?;
        let exporter = CollectorExporter::new(exporter, options.endpoint.clone());
        let provider = SdkTracerProvider::builder()
            .with_span_processor(BatchSpanProcessor::builder(exporter).build())
            .with_resource(resource(options))
            .build();
        Ok(Traces { provider })
    }

    /// Returns a layer that sends the host's spans, whatever the level of the log.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    {
        let ours = ["skep_gateway", "skep_runtime", "skep_engine", "skep_providers"];
        let ours = Targets::new().with_targets(ours.map(|target| (target, LevelFilter::INFO)));
        OpenTelemetryLayer::new(self.provider.tracer("skep"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            // This process opens no spans through OpenTelemetry's own interface.
            .with_context_activation(false)
            .with_filter(ours)
    }

    /// Sends the remaining spans, within a time limit.
    pub fn shutdown(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_DEADLINE) {
            tracing::warn!("the last spans may not have reached the collector: {error}");
        }
    }
}

/// Returns the attributes that all spans of this process have.
fn resource(options: &TraceOptions) -> Resource {
    let defaults =
        [KeyValue::new("service.name", "skep"), KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    let resource = Resource::builder_empty()
        .with_attributes(defaults)
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_detector(Box::new(EnvResourceDetector::new()));
    match &options.service {
        Some(name) => resource.with_service_name(name.clone()).build(),
        None => resource.build(),
    }
}

/// Returns a function that reads the W3C trace context of a request.
pub fn remote_parent() -> RemoteParent {
    let propagator = TraceContextPropagator::new();
    RemoteParent::new(move |headers, span| {
        let context = propagator.extract(&Carrier(headers));
        if context.span().span_context().is_valid()
            && let Err(error) = span.set_parent(context)
        {
            tracing::debug!("cannot continue the caller's trace: {error}");
        }
    })
}

struct Carrier<'a>(&'a HeaderMap);

impl Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<TraceOptions>> {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value);
        TraceOptions::read(flag, |name| value(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn traces_are_off_without_an_endpoint() {
        let off = read(None, &[(SERVICE_VARIABLE, "shop"), (ENDPOINT_VARIABLE, "")]).expect("valid");
        assert_eq!(off, None);
    }

    #[test]
    fn the_flag_takes_precedence_over_the_environment() {
        let variables = [
            (ENDPOINT_VARIABLE, "http://base:1/prefix/"),
            (TRACES_ENDPOINT_VARIABLE, "http://whole:2/spans"),
            (SERVICE_VARIABLE, "shop"),
        ];
        let endpoint = |flag, variables: &[_]| read(flag, variables).expect("valid").expect("on").endpoint;
        assert_eq!(endpoint(Some("http://flag:4318"), &variables), "http://flag:4318/v1/traces");
        assert_eq!(endpoint(None, &variables), "http://whole:2/spans");
        assert_eq!(endpoint(None, &variables[..1]), "http://base:1/prefix/v1/traces");
        let service = read(None, &variables).expect("valid").expect("on").service;
        assert_eq!(service.as_deref(), Some("shop"));
    }

    #[test]
    fn bad_endpoint_names_its_source_and_the_fix() {
        for bad in ["localhost:4318", "127.0.0.1:4318", "https://collector:4318", "grpc://collector:4317"] {
            let error = read(None, &[(ENDPOINT_VARIABLE, bad)]).expect_err(bad).to_string();
            assert!(error.contains(ENDPOINT_VARIABLE) && error.contains("http://127.0.0.1:4318"), "{error}");
        }
    }
}
