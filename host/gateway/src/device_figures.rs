//! Metrics of the GPUs that this process can use, read when `/metrics` is requested. Machines without GPUs have none.

use crate::metrics::{
    DEVICE_ECC_ERRORS, DEVICE_MEMORY_TOTAL, DEVICE_MEMORY_USED, DEVICE_POWER, DEVICE_TEMPERATURE,
    DEVICE_UTILIZATION,
};
use skep_engine::{OfDevice, device_figures};

/// Reads the figures on a thread that may block, and writes them.
pub(crate) async fn record() {
    // A read that panicked leaves the metrics as they were.
    if let Ok(devices) = tokio::task::spawn_blocking(device_figures).await {
        devices.iter().for_each(write);
    }
}

/// Writes the figures of a device. What it does not have is absent.
fn write(OfDevice { ordinal, figures }: &OfDevice) {
    let device = format!("cuda:{ordinal}");
    for (name, value) in [
        (DEVICE_TEMPERATURE, figures.temperature_c),
        (DEVICE_POWER, figures.power_w),
        (DEVICE_MEMORY_USED, figures.memory_used_bytes.map(|bytes| bytes as f64)),
        (DEVICE_MEMORY_TOTAL, figures.memory_total_bytes.map(|bytes| bytes as f64)),
        (DEVICE_UTILIZATION, figures.utilization),
    ] {
        if let Some(value) = value {
            metrics::gauge!(name, "device" => device.clone()).set(value);
        }
    }
    if let Some(errors) = figures.uncorrected_ecc_errors {
        metrics::counter!(DEVICE_ECC_ERRORS, "device" => device).absolute(errors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics_exporter_prometheus::PrometheusBuilder;
    use skep_model::DeviceFigures;

    #[test]
    fn each_figure_that_a_device_has_is_a_metric() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let figures = DeviceFigures {
            temperature_c: Some(41.0),
            power_w: Some(312.5),
            memory_used_bytes: Some(5 << 30),
            memory_total_bytes: Some(80 << 30),
            utilization: None,
            uncorrected_ecc_errors: Some(2),
        };
        metrics::with_local_recorder(&recorder, || write(&OfDevice { ordinal: 1, figures }));
        let text = recorder.handle().render();
        for line in [
            "skep_device_temperature_celsius{device=\"cuda:1\"} 41\n",
            "skep_device_power_watts{device=\"cuda:1\"} 312.5\n",
            "skep_device_memory_used_bytes{device=\"cuda:1\"} 5368709120\n",
            "skep_device_memory_total_bytes{device=\"cuda:1\"} 85899345920\n",
            "skep_device_uncorrected_ecc_errors_total{device=\"cuda:1\"} 2\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(!text.contains(DEVICE_UTILIZATION), "{text}");
    }
}
