#include <memory>

#include "client/cli/format.h"
#include "client/cli/session.h"
#include "client/names.h"

// `stillhouse tenant …`: needs the admin key.
namespace stillhouse::client {
namespace {

absl::Status Create(Session& session, const std::string& id, const std::string& title) {
  CLIENT_RETURN_IF_ERROR(CheckId("tenant id", id));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::Tenant tenant, client->CreateTenant(id, title));
  if (session.json) {
    session.PrintJson(ToJson(tenant));
  } else {
    session.Print(ShortName(tenant.name()) + "\n");
    session.Note("Make a key for it: stillhouse tenant key create " + ShortName(tenant.name()));
  }
  return absl::OkStatus();
}

absl::Status List(Session& session) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto tenants, client->ListTenants());
  Table table({"TENANT", "CREATED", "TITLE"});
  for (const v1::Tenant& tenant : tenants) {
    if (session.json) session.PrintJson(ToJson(tenant));
    table.Row({ShortName(tenant.name()), When(tenant.create_time()), Ellipsis(tenant.display_name(), 60)});
  }
  if (!session.json) session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status Show(Session& session, const std::string& text) {
  CLIENT_ASSIGN(const std::string name, TenantName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::Tenant tenant, client->GetTenant(name));
  if (session.json) {
    session.PrintJson(ToJson(tenant));
    return absl::OkStatus();
  }
  const v1::TenantUsage& usage = tenant.usage();
  Table table({"NAME", tenant.name()});
  table.Row({"title", tenant.display_name()});
  table.Row({"created", When(tenant.create_time())});
  table.Row({"documents", Count(usage.corpora()) + ", " + Bytes(usage.corpora_bytes())});
  table.Row({"memories", Count(usage.caches()) + ", " + Bytes(usage.cache_bytes())});
  table.Row({"unfinished uploads", Count(usage.uploads()) + ", " + Bytes(usage.upload_bytes())});
  session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status Delete(Session& session, const std::string& text) {
  CLIENT_ASSIGN(const std::string name, TenantName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_RETURN_IF_ERROR(client->DeleteTenant(name));
  if (session.json) {
    session.PrintJson({{"deleted", name}});
  } else {
    session.Note("Deleted " + ShortName(name) + ".");
  }
  return absl::OkStatus();
}

absl::Status CreateKey(Session& session, const std::string& text, const std::string& title) {
  CLIENT_ASSIGN(const std::string name, TenantName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::Key key, client->CreateKey(name, title));
  if (session.json) {
    session.PrintJson(ToJson(key));
  } else {
    session.Print(key.secret() + "\n");
    session.Note("This is the only time that the key " + key.name() + " is shown.");
  }
  return absl::OkStatus();
}

absl::Status ListKeys(Session& session, const std::string& text) {
  CLIENT_ASSIGN(const std::string name, TenantName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto keys, client->ListKeys(name));
  Table table({"KEY", "CREATED", "REVOKED", "TITLE"});
  for (const v1::Key& key : keys) {
    if (session.json) session.PrintJson(ToJson(key));
    table.Row({key.name(), When(key.create_time()), When(key.revoke_time()), Ellipsis(key.display_name(), 60)});
  }
  if (!session.json) session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status DeleteKey(Session& session, const std::string& name) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_RETURN_IF_ERROR(client->DeleteKey(name));
  if (session.json) {
    session.PrintJson({{"deleted", name}});
  } else {
    session.Note("Revoked " + name + ".");
  }
  return absl::OkStatus();
}

}  // namespace

void AddTenantCommands(CLI::App& app, Session& session) {
  CLI::App* group = app.add_subcommand("tenant", "Who may call (admin key): create, list, show, delete, key");
  group->require_subcommand(1);
  group->fallthrough();
  group->footer(
      "Examples:\n"
      "  STILLHOUSE_KEY=$ADMIN stillhouse tenant create legal --title \"Legal department\"\n"
      "  STILLHOUSE_KEY=$ADMIN stillhouse tenant key create legal --title ci > legal.key");

  using One = absl::Status (*)(Session&, const std::string&);
  using Titled = absl::Status (*)(Session&, const std::string&, const std::string&);
  const auto one = [&session](CLI::App* parent, const char* verb, const char* text, const char* argument,
                              const char* help, One run) {
    auto name = std::make_shared<std::string>();
    CLI::App* command = parent->add_subcommand(verb, text);
    command->add_option(argument, *name, help)->required();
    command->callback(
        [&session, name, run] { session.action = [&session, name, run] { return run(session, *name); }; });
  };
  const auto titled = [&session](CLI::App* parent, const char* verb, const char* text, const char* help, Titled run) {
    auto name = std::make_shared<std::string>();
    auto title = std::make_shared<std::string>();
    CLI::App* command = parent->add_subcommand(verb, text);
    command->add_option("tenant", *name, help)->required();
    command->add_option("--title", *title, "One line that says what it is for");
    command->callback([&session, name, title, run] {
      session.action = [&session, name, title, run] { return run(session, *name, *title); };
    });
  };
  titled(group, "create", "Make a tenant", "Id of the new tenant", Create);
  group->add_subcommand("list", "All tenants")->callback([&session] {
    session.action = [&session] { return List(session); };
  });
  one(group, "show", "One tenant and what it holds", "tenant", "Its id", Show);
  one(group, "delete", "Delete an empty tenant", "tenant", "Its id", Delete);

  CLI::App* key = group->add_subcommand("key", "Bearer keys of a tenant: create, list, delete");
  key->require_subcommand(1);
  key->fallthrough();
  titled(key, "create", "Make a key and print it, once", "The tenant's id", CreateKey);
  one(key, "list", "Keys of a tenant", "tenant", "Its id", ListKeys);
  one(key, "delete", "Revoke a key at once", "key", "tenants/TENANT/keys/KEY", DeleteKey);
}

}  // namespace stillhouse::client
