//! Results of a measurement, as JSON and as text.

use anyhow::Result;
use serde::Serialize;
use skep_model::MemoryPlan;

use super::against::Against;
use super::ceilings::Ceilings;
use super::steps::{Amounts, Times};
use super::subject::Loaded;
use super::work::{Operations, decode_bytes};
use crate::commands::out;

/// Results of one model on one device.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub model: String,
    pub device: String,
    pub isa: String,
    pub threads: usize,
    #[serde(flatten)]
    pub amounts: Amounts,
    pub kv: String,
    pub load: Load,
    pub memory: MemoryPlan,
    pub ceilings: Rates,
    pub prefill: Option<Prefill>,
    pub decode: Option<Decode>,
    pub against: Option<Against>,
}

/// Time of loading a model.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Load {
    pub seconds: f64,
    /// Rate at which weights were loaded.
    pub gb_per_s: f64,
}

/// Rates of the device, measured in the same run.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Rates {
    pub read_gb_per_s: f64,
    /// `None` if there was no library to measure it with.
    pub weights_tflop_per_s: Option<f64>,
    pub attention_tflop_per_s: Option<f64>,
}

/// Results of prefill.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Prefill {
    pub tok_per_s: f64,
    pub tflop_per_s: f64,
    /// Share of the time that its operations alone take at the measured rates.
    pub share: Option<f64>,
    /// Share of the time that its products with weights alone take.
    pub weights_share: Option<f64>,
}

/// Results of decode.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Decode {
    /// Rate of all sequences together.
    pub tok_per_s: f64,
    pub ms_per_step: f64,
    /// Weights, keys and values.
    pub read_bytes_per_step: f64,
    pub read_gb_per_s: f64,
    /// Share of the measured bandwidth.
    pub read_share: f64,
    /// Share of the time that reading takes, or computing if that takes longer.
    pub roofline_share: f64,
}

impl Load {
    /// Reads the figures of a loaded model.
    pub(super) fn of(loaded: &Loaded) -> Self {
        let bytes = loaded.executor.plan().weight_bytes as f64;
        Load { seconds: loaded.load_s, gb_per_s: bytes / loaded.load_s / 1e9 }
    }
}

impl From<Ceilings> for Rates {
    fn from(ceilings: Ceilings) -> Self {
        let Ceilings { read_gb_per_s, products } = ceilings;
        Rates {
            read_gb_per_s,
            weights_tflop_per_s: products.map(|rates| rates.weight_ops_per_s / 1e12),
            attention_tflop_per_s: products.map(|rates| rates.attention_ops_per_s / 1e12),
        }
    }
}

/// Returns the results of both parts, as far as they were measured.
pub(super) fn shares(
    loaded: &Loaded,
    amounts: Amounts,
    times: Times,
    ceilings: &Ceilings,
) -> (Option<Prefill>, Option<Decode>) {
    let Amounts { prompt, generate, depth, shared, batch, .. } = amounts;
    let prefill = times.prefill_s.map(|seconds| {
        let one = seconds / batch as f64;
        let operations = Operations::prefill(&loaded.config, depth, prompt);
        let weights = Operations { attention: 0.0, ..operations };
        Prefill {
            tok_per_s: prompt as f64 / one,
            tflop_per_s: operations.total() / one / 1e12,
            share: ceilings.compute_s(operations).map(|least| least / one),
            weights_share: ceilings.compute_s(weights).map(|least| least / one),
        }
    });
    let decode = times.decode_s.map(|seconds| {
        let step = seconds / generate as f64;
        let executor = (loaded.executor.plan(), loaded.executor.limits());
        let parts = (loaded.looked_up_bytes, loaded.expert_bytes);
        let bytes = decode_bytes(&loaded.config, executor, parts, (depth, shared, generate, batch));
        let operations = Operations::decode(&loaded.config, depth, generate, batch);
        let read_s = ceilings.read_s(bytes);
        Decode {
            tok_per_s: batch as f64 / step,
            ms_per_step: step * 1e3,
            read_bytes_per_step: bytes,
            read_gb_per_s: bytes / step / 1e9,
            read_share: read_s / step,
            roofline_share: read_s.max(ceilings.compute_s(operations).unwrap_or(0.0)) / step,
        }
    });
    (prefill, decode)
}

impl Report {
    /// Prints the results as text.
    pub(super) fn for_people(&self) -> Result<()> {
        let Report { model, device, isa, threads, kv, load, ceilings, .. } = self;
        let Amounts { depth, batch, .. } = self.amounts;
        let place = match device.as_str() {
            "cpu" => format!("{threads} threads, {isa}"),
            device => device.to_owned(),
        };
        out::line(&format!(
            "{model}: {place}, {kv} keys and values, batch {batch}, depth {depth}, loaded in {:.2} s ({:.1} GB/s)",
            load.seconds, load.gb_per_s
        ))?;
        out::line(&format!("  memory  {}", self.memory))?;
        if let Some(prefill) = &self.prefill {
            let Prefill { tok_per_s, tflop_per_s, share, .. } = prefill;
            out::line(&format!(
                "  prefill {:>6} tokens  {tok_per_s:>9.1} tok/s  {tflop_per_s:.2} TFLOP/s",
                self.amounts.prompt
            ))?;
            if let (Some(share), Some(weights), Some(attention)) =
                (share, ceilings.weights_tflop_per_s, ceilings.attention_tflop_per_s)
            {
                out::line(&format!(
                    "  its products alone take {:.0} % of that time at the measured {weights:.2} TFLOP/s for weights and {attention:.2} for attention",
                    share * 100.0
                ))?;
            }
        }
        if let Some(decode) = &self.decode {
            let Decode { tok_per_s, ms_per_step, read_bytes_per_step, read_gb_per_s, read_share, .. } =
                decode;
            out::line(&format!(
                "  decode  {:>6} tokens  {tok_per_s:>9.1} tok/s  {ms_per_step:.3} ms per step",
                self.amounts.generate
            ))?;
            out::line(&format!(
                "  a step reads {:.1} MB at {read_gb_per_s:.1} GB/s, {:.0} % of the measured {:.1} GB/s",
                read_bytes_per_step / 1e6,
                read_share * 100.0,
                ceilings.read_gb_per_s
            ))?;
        }
        if let Some(against) = &self.against {
            out::line(&format!("  {}", against.for_people()))?;
        }
        Ok(())
    }
}
