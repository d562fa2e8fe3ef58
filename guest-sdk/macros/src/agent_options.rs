//! The options of `#[agent(…)]`: its tools, its other handlers, and for an agent without a function what it
//! answers with.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, Ident, Lit, Path, Result, Token, bracketed};

const KNOWN: &str = "`instructions = \"…\"`, `model = \"…\"`, `temperature = 0.5`, `max_tokens = 200`, `tools = [a, b]`, `host_tools = [\"mcp:files/*\"]`, `on_alarm = f` and \
                     `on_event = f`, each once";

/// The parsed options. An option with its name is a pair, so that errors can point to the name.
#[derive(Default)]
pub struct AgentOptions {
    pub instructions: Option<(Ident, Expr)>,
    pub model: Option<(Ident, Expr)>,
    pub temperature: Option<(Ident, Expr)>,
    pub max_tokens: Option<(Ident, Expr)>,
    pub tools: Vec<Path>,
    pub host_tools: Option<(Ident, Vec<Expr>)>,
    on_alarm: Option<Path>,
    on_event: Option<Path>,
}

impl Parse for AgentOptions {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut options = Self::default();
        let mut tools = None;
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            let unexpected =
                || Error::new(name.span(), format!("unexpected `{name}`; `#[agent]` accepts {KNOWN}"));
            input.parse::<Token![=]>().map_err(|_| unexpected())?;
            match name.to_string().as_str() {
                "instructions" if options.instructions.is_none() => {
                    let hint = "tell the model who it is and what it does";
                    options.instructions = Some(text(name, hint, input)?);
                }
                "model" if options.model.is_none() => {
                    let hint = "name a model, or remove `model` to use the one of `agent.toml`";
                    options.model = Some(text(name, hint, input)?);
                }
                "temperature" if options.temperature.is_none() => {
                    options.temperature = Some(number(name, "0.5", input)?);
                }
                "max_tokens" if options.max_tokens.is_none() => {
                    options.max_tokens = Some(number(name, "200", input)?);
                }
                "tools" if tools.is_none() => tools = Some(list::<Path>(input)?),
                "host_tools" if options.host_tools.is_none() => {
                    options.host_tools = Some((name, list(input)?));
                }
                "on_alarm" if options.on_alarm.is_none() => options.on_alarm = Some(input.parse()?),
                "on_event" if options.on_event.is_none() => options.on_event = Some(input.parse()?),
                _ => return Err(unexpected()),
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        options.tools = tools.unwrap_or_default();
        options.check_tools()?;
        Ok(options)
    }
}

impl AgentOptions {
    fn check_tools(&self) -> Result<()> {
        let name = |tool: &Path| tool.segments.last().map(|segment| segment.ident.clone());
        for (index, tool) in self.tools.iter().enumerate() {
            if self.tools[..index].iter().any(|other| name(other) == name(tool)) {
                return Err(Error::new_spanned(
                    tool,
                    "there are two tools with this name; the model could not distinguish them",
                ));
            }
        }
        Ok(())
    }

    /// Returns the options that only an agent without a function takes, besides its instructions. Each has the
    /// name of the method that sets it in a function.
    pub fn answer_options(&self) -> impl Iterator<Item = &Ident> {
        let host_tools = self.host_tools.as_ref().map(|(name, _)| name);
        let others = [&self.temperature, &self.max_tokens].into_iter().flatten().map(|(name, _)| name);
        host_tools.into_iter().chain(others)
    }

    /// Returns the calls that set the options of an `Agent` that both forms share.
    pub fn calls(&self) -> TokenStream {
        let model = self.model.iter().map(|(_, model)| quote! { .with_model(#model) });
        let on_alarm = self.on_alarm.iter().map(|function| {
            quote! { .on_alarm(|__cx, __alarm| ::std::boxed::Box::pin(#function(__cx, __alarm))) }
        });
        let on_event = self.on_event.iter().map(|function| {
            quote! { .on_event(|__cx, __event| ::std::boxed::Box::pin(#function(__cx, __event))) }
        });
        quote! { #(#model)* #(#on_alarm)* #(#on_event)* }
    }
}

/// Parses a text: a literal that is not empty, or an expression such as a constant or `include_str!`.
fn text(name: Ident, hint: &str, input: ParseStream<'_>) -> Result<(Ident, Expr)> {
    let expected = format!("`{name}` must be a text: `{name} = \"…\"`, a constant, or `include_str!(\"…\")`");
    let value: Expr = input.parse().map_err(|error| Error::new(error.span(), &expected))?;
    if let Expr::Lit(literal) = &value {
        match &literal.lit {
            Lit::Str(text) if text.value().trim().is_empty() => {
                return Err(Error::new(text.span(), format!("`{name}` is empty: {hint}")));
            }
            Lit::Str(_) => {}
            other => return Err(Error::new(other.span(), expected)),
        }
    }
    Ok((name, value))
}

/// Parses a number like `example`, or an expression such as a constant.
fn number(name: Ident, example: &str, input: ParseStream<'_>) -> Result<(Ident, Expr)> {
    let expected = format!("`{name}` must be a number: `{name} = {example}`");
    let value: Expr = input.parse().map_err(|error| Error::new(error.span(), &expected))?;
    let is_like_example = match &value {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Float(_) => example.contains('.'),
            Lit::Int(_) => !example.contains('.'),
            _ => false,
        },
        _ => true,
    };
    if is_like_example { Ok((name, value)) } else { Err(Error::new_spanned(value, expected)) }
}

fn list<T: Parse>(input: ParseStream<'_>) -> Result<Vec<T>> {
    let content;
    bracketed!(content in input);
    Ok(Punctuated::<T, Token![,]>::parse_terminated(&content)?.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse2;

    #[test]
    fn each_misuse_has_a_specific_error() {
        for (options, expected) in [
            (quote! { tool = [a] }, "unexpected `tool`"),
            (quote! { tools = [a], tools = [b] }, "each once"),
            (quote! { tools = [a, b::a] }, "two tools"),
            (quote! { instructions }, "unexpected `instructions`; `#[agent]` accepts `instructions = \"…\"`"),
            (quote! { instructions = }, "`instructions` must be a text: `instructions = \"…\"`"),
            (quote! { instructions = 5 }, "a constant, or `include_str!(\"…\")`"),
            (quote! { instructions = " " }, "tell the model who it is"),
            (quote! { model = "" }, "remove `model` to use the one of `agent.toml`"),
            (quote! { temperature = 0 }, "`temperature` must be a number: `temperature = 0.5`"),
            (quote! { max_tokens = "200" }, "`max_tokens` must be a number: `max_tokens = 200`"),
            (quote! { prompt = "You are kind." }, "unexpected `prompt`"),
        ] {
            let text = options.to_string();
            let message = parse2::<AgentOptions>(options).err().expect(&text).to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn texts_may_be_constants() {
        let options: AgentOptions =
            parse2(quote! { instructions = include_str!("system.md"), model = models::SMALL, })
                .expect("valid");
        assert!(options.instructions.is_some());
        assert_eq!(options.calls().to_string(), quote! { .with_model(models::SMALL) }.to_string());
    }
}
