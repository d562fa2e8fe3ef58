//! Combines the lists of origins that must all allow a request, and names the line of the file that would allow
//! it.

mod secret;

pub(crate) use secret::Carried;
pub use secret::{Redactor, Secret, Secrets, check_secret_value};

use crate::{Origin, Origins, OutboundError};
use std::{borrow::Cow, sync::Arc};

/// Lists of origins that must all allow a request. `Default` has no list and allows nothing.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    rules: Vec<Rule>,
    secrets: Arc<Secrets>,
}

#[derive(Clone, Debug)]
struct Rule {
    origins: Arc<Origins>,
    line: Cow<'static, str>,
}

impl Policy {
    /// Adds a list. `line` says where it is written, such as "hosts under \[grants\] in agent.toml", and
    /// appears in refusals.
    pub fn and(mut self, origins: impl Into<Arc<Origins>>, line: impl Into<Cow<'static, str>>) -> Self {
        self.rules.push(Rule { origins: origins.into(), line: line.into() });
        self
    }

    /// Sets the secrets that the request may name.
    pub fn with_secrets(self, secrets: Secrets) -> Self {
        Policy { secrets: Arc::new(secrets), ..self }
    }

    pub(crate) fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// Checks that every list allows `origin`; the error names all lists that do not.
    pub fn check(&self, origin: &Origin) -> Result<(), OutboundError> {
        let refusing = self.rules.iter().filter(|rule| !rule.origins.allows(origin)).map(|rule| &*rule.line);
        let refusing = refusing.collect::<Vec<_>>();
        let line = match (self.rules.is_empty(), refusing.as_slice()) {
            (false, []) => return Ok(()),
            (false, lines) => lines.join(", and to "),
            (true, _) => "a list of hosts (none is configured)".to_owned(),
        };
        Err(OutboundError::NotGranted { origin: origin.clone(), line })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OriginPattern;

    fn origins(patterns: &[&str]) -> Origins {
        let patterns =
            patterns.iter().map(|pattern| pattern.parse().expect(pattern)).collect::<Vec<OriginPattern>>();
        patterns.try_into().expect("few")
    }

    #[test]
    fn every_list_must_allow_the_origin_and_a_refusal_names_those_that_do_not() {
        let origin = Origin::of(&"https://a.org".parse().expect("a URL")).expect("an origin");
        let check = |agent: &[&str], operator: &[&str]| {
            let policy =
                Policy::default().and(origins(agent), "agent.toml").and(origins(operator), "skep.toml");
            policy.check(&origin).map_err(|error| error.to_string())
        };
        assert_eq!(check(&["https://a.org"], &["*"]), Ok(()));
        assert_eq!(
            check(&["https://b.org"], &["*"]),
            Err("https://a.org is not granted; add \"https://a.org\" to agent.toml".to_owned())
        );
        let neither = check(&[], &[]).expect_err("no list allows it");
        assert!(neither.ends_with("to agent.toml, and to skep.toml"), "{neither}");
        assert!(Policy::default().check(&origin).is_err());
    }
}
