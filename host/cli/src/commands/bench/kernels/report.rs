//! Results of the operations, as JSON and as a section of a Markdown file.

use anyhow::Result;
use serde::Serialize;
use skep_kernels::KernelError;
use skep_kernels::cuda::rates::{Bound, Operation, Rate};

use crate::commands::out;

/// Results on one device.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub date: String,
    pub device: String,
    pub command: String,
    pub shape: String,
    /// Sizes of the layer and of the head, for display.
    pub layer: String,
    pub copy_gb_per_s: f64,
    /// Best rate of cuBLASLt with the layer's matrices; `None` without that library.
    pub product_tflop_per_s: Option<f64>,
    /// Time that all measurements took.
    pub seconds: f64,
    pub rows: Vec<Row>,
}

/// An operation with its result.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub operation: String,
    pub sizes: String,
    #[serde(flatten)]
    pub outcome: Outcome,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Outcome {
    Measured {
        us: f64,
        gb_per_s: f64,
        copy_share: f64,
        tflop_per_s: f64,
        product_share: Option<f64>,
        bound: Limit,
    },
    Failed {
        error: String,
    },
}

/// The upper bound that an operation is closest to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Limit {
    /// The cost of a launch, which no rate describes.
    Launch,
    Copies,
    Products,
}

impl Outcome {
    pub(super) fn new(operation: &Operation, measured: Result<Rate, KernelError>) -> Self {
        let rate = match measured {
            Ok(rate) => rate,
            Err(error) => return Outcome::Failed { error: error.to_string() },
        };
        let bound = match (operation, rate.bound) {
            (Operation::Launch, _) => Limit::Launch,
            (_, Bound::Copies) => Limit::Copies,
            (_, Bound::Products) => Limit::Products,
        };
        let Rate { us, gb_per_s, copy_share, tflops: tflop_per_s, product_share, .. } = rate;
        Outcome::Measured { us, gb_per_s, copy_share, tflop_per_s, product_share, bound }
    }

    /// Returns the time, the rate and the share for people.
    fn cells(&self) -> [String; 3] {
        let (us, gb_per_s, copy_share, tflop_per_s, product_share, bound) = match self {
            Outcome::Failed { error } => return ["–".to_owned(), error.replace('\n', " "), "–".to_owned()],
            Outcome::Measured { us, gb_per_s, copy_share, tflop_per_s, product_share, bound } => {
                (us, gb_per_s, copy_share, tflop_per_s, product_share, bound)
            }
        };
        let [rate, share] = match bound {
            Limit::Launch => ["–".to_owned(), "–".to_owned()],
            Limit::Copies => {
                [format!("{gb_per_s:.0} GB/s"), format!("{:.0} % of copies", copy_share * 100.0)]
            }
            Limit::Products => [
                format!("{tflop_per_s:.1} TFLOP/s"),
                format!("{:.0} % of products", product_share.unwrap_or(f64::NAN) * 100.0),
            ],
        };
        [format!("{us:.1}"), rate, share]
    }
}

impl Report {
    /// Returns the number of operations that failed.
    pub(super) fn failures(&self) -> u64 {
        self.rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed { .. })).count() as u64
    }

    /// Prints a section of a Markdown file, as kernels/MEASURED.md has it.
    pub(super) fn for_people(&self) -> Result<()> {
        out::line(&self.markdown())
    }

    fn markdown(&self) -> String {
        let Report { date, device, command, shape, layer, copy_gb_per_s, seconds, .. } = self;
        let products = self.product_tflop_per_s.map_or_else(
            || "products were not measured without cuBLASLt".to_owned(),
            |rate| format!("{rate:.0} TFLOP/s for cuBLASLt's products"),
        );
        let mut text = format!(
            "## {date}, {device}\n\n`{command}`\n\nSizes of {shape}: {layer}. Upper bounds of this run: {copy_gb_per_s:.0} GB/s \
             for copies, {products}. Measured in {seconds:.1} s.\n\n\
             | Operation | Sizes | µs | Rate | Share |\n|---|---|---:|---:|---:|"
        );
        for Row { operation, sizes, outcome } in &self.rows {
            let [us, rate, share] = outcome.cells();
            text += &format!("\n| {operation} | {sizes} | {us} | {rate} | {share} |");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(operation: &Operation, measured: Result<Rate, KernelError>) -> Row {
        let outcome = Outcome::new(operation, measured);
        Row { operation: operation.name(), sizes: "64 x 8".to_owned(), outcome }
    }

    fn report() -> Report {
        let rate = Rate {
            us: 12.34,
            gb_per_s: 2712.0,
            copy_share: 0.904,
            tflops: 15.27,
            product_share: Some(0.02),
            bound: Bound::Copies,
        };
        let rows = vec![
            row(&Operation::Launch, Ok(rate)),
            row(&Operation::Swiglu { rows: 64 }, Ok(rate)),
            row(&Operation::Qkv { rows: 64 }, Ok(Rate { bound: Bound::Products, ..rate })),
            row(&Operation::RmsNorm { rows: 64 }, Err(KernelError::TooLarge { op: "test", what: "it" })),
        ];
        Report {
            date: "2026-01-02".to_owned(),
            device: "cuda:0".to_owned(),
            command: "skep bench kernels".to_owned(),
            shape: "tiny".to_owned(),
            layer: "hidden 256".to_owned(),
            copy_gb_per_s: 3000.4,
            product_tflop_per_s: Some(651.2),
            seconds: 4.25,
            rows,
        }
    }

    #[test]
    fn the_table_shows_the_bound_that_is_closer() {
        let text = report().markdown();
        assert!(text.contains("3000 GB/s for copies, 651 TFLOP/s for cuBLASLt's products"), "{text}");
        let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("|---")).skip(1).collect();
        assert_eq!(
            rows[..3],
            [
                "| launch | 64 x 8 | 12.3 | – | – |",
                "| swiglu | 64 x 8 | 12.3 | 2712 GB/s | 90 % of copies |",
                "| qkv | 64 x 8 | 12.3 | 15.3 TFLOP/s | 2 % of products |",
            ]
        );
        assert!(rows[3].starts_with("| rms_norm | 64 x 8 | – | "), "{}", rows[3]);
        assert_eq!((rows.len(), report().failures()), (4, 1));
        let without = Report { product_tflop_per_s: None, ..report() }.markdown();
        assert!(without.contains("not measured without cuBLASLt"), "{without}");
    }

    #[test]
    fn the_document_has_all_rates_or_the_error() {
        let document = serde_json::to_value(report()).expect("a document");
        assert_eq!(document["rows"][1]["gb_per_s"], 2712.0);
        assert_eq!(document["rows"][1]["tflop_per_s"], 15.27);
        let bounds = [0, 1, 2].map(|row| document["rows"][row]["bound"].clone());
        assert_eq!(bounds, ["launch", "copies", "products"]);
        assert!(document["rows"][3]["error"].is_string() && document["rows"][3].get("us").is_none());
    }
}
