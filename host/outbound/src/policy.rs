//! Who has to agree to a request, and which line of whose file would make them.

use crate::{Origin, Origins, OutboundError, Secrets};
use std::{borrow::Cow, sync::Arc};

/// Lists of origins that all have to allow a request. `Default` allows nothing, because nobody does.
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
    /// A further list. `line` says where it is written, such as "hosts under \[grants\] in agent.toml".
    pub fn and(mut self, origins: impl Into<Arc<Origins>>, line: impl Into<Cow<'static, str>>) -> Self {
        self.rules.push(Rule { origins: origins.into(), line: line.into() });
        self
    }

    /// What the request may name.
    pub fn with_secrets(self, secrets: Secrets) -> Self {
        Policy { secrets: Arc::new(secrets), ..self }
    }

    pub(crate) fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// Whether everyone agrees; the error names all who do not.
    pub fn check(&self, origin: &Origin) -> Result<(), OutboundError> {
        let refusing = self.rules.iter().filter(|rule| !rule.origins.allows(origin)).map(|rule| &*rule.line);
        let refusing = refusing.collect::<Vec<_>>();
        let line = match (self.rules.is_empty(), refusing.as_slice()) {
            (false, []) => return Ok(()),
            (false, lines) => lines.join(", and to "),
            (true, _) => "a list of hosts, of which there is none".to_owned(),
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
    fn everyone_has_to_agree_and_a_refusal_names_the_lines_of_those_who_do_not() {
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
        let neither = check(&[], &[]).expect_err("nobody agrees");
        assert!(neither.ends_with("to agent.toml, and to skep.toml"), "{neither}");
        assert!(Policy::default().check(&origin).is_err());
    }
}
