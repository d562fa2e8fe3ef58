//! The sampling parameters that the authors of models recommend in their model cards, for models of the catalog
//! whose files do not have them.

use skep_model::Sampling;

/// Returns the recommended parameters of a model of the catalog.
pub fn of(name: &str) -> Option<Sampling> {
    match name {
        // The card of SmolLM2-135M-Instruct generates with these.
        "smollm2-135m" => Some(Sampling { temperature: 0.2, top_p: 0.9, ..Sampling::default() }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_model_has_valid_parameters() {
        of(crate::catalog::DEFAULT_MODEL).expect("recommended").validate().expect("valid");
        assert_eq!(of("unknown"), None);
    }
}
