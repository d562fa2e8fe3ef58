//! Reviews one hunk of a diff. A batch sends it the hunks of a whole diff, each in a session of its own, and the
//! host answers them when it has room.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// A review of one hunk. The model writes the comment before the verdict, so that the verdict follows from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Review {
    /// One sentence on the effect of the change, and on the fault in it if there is one.
    #[schemars(length(min = 10, max = 160))]
    comment: String,
    verdict: Verdict,
}

/// Whether somebody has to look at the hunk.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Fine,
    Question,
    Bug,
}

const RULES: &str = "You review changes of Rust code. Lines with - were removed, lines with + were added. \
                     Reply with a comment of one sentence and a verdict, as JSON.";

fn example(comment: &str, verdict: Verdict) -> Review {
    Review { comment: comment.to_owned(), verdict }
}

/// Reviews one hunk of a diff.
#[agent]
async fn code_reviewer(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    if !message.text.lines().any(|line| line.starts_with("@@ ")) {
        return Err(AgentError::InvalidMessage("send one hunk of a diff, with its line `@@ … @@`".into()));
    }
    let review: Review = cx
        .conversation()
        .clear()
        .system(RULES)
        .example(
            "src/mean.rs\n@@ -4,3 +4,3 @@ fn mean\n     let total: u32 = values.iter().sum();\n-    total / values.len() as u32\n\
             +    total / values.len().max(1) as u32\n }",
            &example("The mean of an empty list no longer divides by zero.", Verdict::Fine),
        )
        .example(
            "src/users.rs\n@@ -10,2 +10,2 @@ fn admin\n-    users.first()\n+    users.iter().find(|user| user.admin).unwrap()\n }",
            &example("`unwrap` panics if there is no admin.", Verdict::Bug),
        )
        .example(
            "src/cache.rs\n@@ -1,2 +1,2 @@\n-const SIZE: usize = 64;\n+const SIZE: usize = 4096;\n",
            &example("The cache grows from 64 to 4096 entries; is there enough memory?", Verdict::Question),
        )
        .example(
            "src/log.rs\n@@ -7,3 +7,3 @@ impl Log\n-    msgs: Vec<String>,\n+    messages: Vec<String>,\n     level: Level,",
            &example("A field is renamed from `msgs` to `messages`.", Verdict::Fine),
        )
        .user(&message.text)
        .temperature(0.0)
        .max_tokens(120)
        .hidden()
        .extract()
        .await?;
    let verdict = format!("{:?}", review.verdict).to_lowercase();
    Reply::json(format!("{verdict}: {}", review.comment), &review)
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    const HUNK: &str = "src/a.rs\n@@ -1 +1 @@\n-let a = 1;\n+let a = 2;";

    #[test]
    fn a_hunk_gets_a_comment_and_a_verdict() {
        let review = json!({"comment": "The value of `a` changes.", "verdict": "question"});
        let mut harness = Harness::new(code_reviewer).model(ScriptedModel::new().json(&review));
        let reply = harness.send(HUNK).unwrap().reply;
        assert_eq!((reply.text.as_str(), reply.data), ("question: The value of `a` changes.", Some(review)));
    }

    #[test]
    fn a_text_without_a_hunk_is_refused() {
        let error = Harness::new(code_reviewer).send("let a = 2;").unwrap_err();
        assert!(matches!(error, AgentError::InvalidMessage(_)), "{error}");
    }
}
