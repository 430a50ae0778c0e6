// SPDX-License-Identifier: Apache-2.0
#include "cpu/compile_variant.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/sha256.h"
#include "cpu/isa.h"
#include "cpu/kernel.h"
#include "flashplan/flashplan.h"
#include "variant/compiler_process.h"
#include "variant/disk_cache.h"
#include "variant/embedded_sources.h"
#include "variant/private_file.h"
#include "variant/registry.h"
#include "variant/source.h"

namespace flashplan::cpu {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEntry = "flashplan_run_queue";
// The source that comes before the source of the variant.
constexpr const char* kHeaders =
    "#define FLASHPLAN_ISA user\n"
    "#include <math.h>\n"
    "#include \"cpu/run_queue.h\"\n";

struct Compiled {
  std::mutex mutex;
  RunQueue run_queue = nullptr;
  std::string kernel_name;
};

/// The compiler and its options: $CXX, or the first of the usual names that exists. Empty: there is
/// no compiler.
std::vector<std::string> compiler_command() {
  std::vector<std::string> command = words_of("CXX");
  if (!command.empty()) {
    command[0] = find_program(command[0]);
    return command[0].empty() ? std::vector<std::string>() : command;
  }
  for (const char* name : {"c++", "g++", "clang++"}) {
    if (std::string path = find_program(name); !path.empty()) return {path};
  }
  return {};
}

Status no_compiler() {
  const char* wanted = std::getenv("CXX");
  return error(StatusCode::kUnsupported,
               "variant: expected a C++ compiler for the CPU (of C++20: install g++ or clang++, or "
               "set CXX to one), got %s%.80s",
               wanted != nullptr && *wanted != '\0' ? "CXX=" : "no c++ in PATH",
               wanted != nullptr ? wanted : "");
}

/// The compiler's options for a shared library whose code is as fast as the built-in kernels. They
/// repeat options of cmake/cpu_instances.cmake, which compiles these kernels. The options in
/// FLASHPLAN_CXXFLAGS come last, so they override the others.
std::vector<std::string> compiler_options() {
  std::vector<std::string> options = {"-std=c++20",
                                      "-O3",
                                      "-fno-math-errno",
                                      "-fno-trapping-math",
                                      "-ffp-contract=fast",
                                      "-shared",
                                      "-fPIC",
                                      "-I.",
                                      "-fvisibility=hidden",
                                      "-fno-exceptions",
                                      "-fno-rtti",
                                      "-Werror=return-type",
                                      "-fdiagnostics-color=never"};
  switch (widest_isa()) {
    case Isa::kAvx512:
      options.insert(options.end(), {"-march=x86-64-v4", "-mprefer-vector-width=512"});
      break;
    case Isa::kAvx2: options.push_back("-march=x86-64-v3"); break;
    case Isa::kBaseline: break;
  }
  const std::vector<std::string> own = words_of("FLASHPLAN_CXXFLAGS");
  options.insert(options.end(), own.begin(), own.end());
  return options;
}

std::string program_source(const AttentionOptions& options) {
  std::string text = kHeaders;
  text +=
      "#define FLASHPLAN_DEVICE FLASHPLAN_INLINE\n"
      "namespace flashplan::cpu::user {\nnamespace {\nnamespace variant {\n"
      "#include \"cpu/variant_math.h\"\n"
      "#include \"abi/variant_math.h\"\n";
  text += variant_source(*options.variant.impl(), options.softcap > 0.0F);
  text += "}\n}\n}\nextern \"C\" __attribute__((visibility(\"default\"))) void ";
  text += kEntry;
  text +=
      "(const flashplan::AttentionParams& params, int32_t cta, std::byte* scratch) noexcept {\n"
      "  using namespace flashplan;\n"
      "  cpu::user::run_queue<";
  text += dtype_constant(options.kv_dtype);
  return text + ", cpu::user::variant::UserVariant>(params, cta, scratch);\n}\n";
}

/// A digest of everything that the compiled code depends on.
std::string cache_key(const std::string& source, const std::vector<std::string>& command) {
  Sha256 hash;
  hash.add_text("cpu");
  hash.add_text(version());
  hash.add_text(source);
  for (const EmbeddedSource& file : embedded_sources()) {
    hash.add_text(file.path);
    hash.add_text(file.text);
  }
  for (const std::string& word : command) hash.add_text(word);
  for (const std::string& word : compiler_options()) hash.add_text(word);
  // Each program that the command names may have been replaced by another one of the same name. The
  // command may name two, a launcher and the compiler, such as "ccache g++".
  for (const std::string& word : command) {
    const std::string found = find_program(word);
    if (found.empty()) continue;  // the word is an option, not a program
    std::error_code error;
    const fs::path program = fs::canonical(found, error);
    hash.add_text(program.string());
    hash.add_text(std::to_string(fs::file_size(program, error)));
    hash.add_text(std::to_string(fs::last_write_time(program, error).time_since_epoch().count()));
  }
  return to_hex(hash.digest());
}

bool write_file(const fs::path& path, std::string_view text) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  return file.good();
}

RunQueue load_file(const fs::path& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  void* const entry = ::dlsym(library, kEntry);
  if (entry == nullptr) ::dlclose(library);
  return reinterpret_cast<RunQueue>(entry);
}

std::string path_of(const Descriptor& file) {
  return "/proc/self/fd/" + std::to_string(file.number());
}

/// Loads the code from a private copy in memory. If the file in the cache were opened again by its
/// path, it could be another file than the one whose checksum was tested.
RunQueue load_code(const std::string& code) {
  Descriptor memory(::memfd_create("flashplan variant", MFD_CLOEXEC));
  if (memory.is_open() && write_all(memory.number(), code)) {
    // If dlopen() has loaded a library from a path before, it returns this library, even if the
    // descriptor in the path belongs to another file. So the copy gets a descriptor whose path was
    // never loaded.
    while (void* const other = ::dlopen(path_of(memory).c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
      ::dlclose(other);
      Descriptor next(::fcntl(memory.number(), F_DUPFD_CLOEXEC, memory.number() + 1));
      if (!next.is_open()) return nullptr;
      memory = std::move(next);
    }
    if (const RunQueue entry = load_file(path_of(memory))) return entry;
  }
  const TemporaryFolder folder;
  const fs::path library = folder.path() / "variant.so";
  if (folder.path().empty() || !write_file(library, code)) return nullptr;
  return load_file(library);
}

/// The first line of a compiler's output that says what is wrong, such as
/// "alibi.logits:1:8: error: ...".
std::string first_error(const std::string& output) {
  std::istringstream lines(output);
  std::string first;
  for (std::string line; std::getline(lines, line);) {
    if (first.empty()) first = line;
    if (line.find("error:") != std::string::npos) return line;
  }
  return first.empty() ? "no message" : first;
}

/// Whether a compiler says that it could not write its files. run_process() makes it use English.
bool has_no_room(const std::string& output) {
  constexpr const char* kReasons[] = {"No space left on device", "File too large",
                                      "Disk quota exceeded"};
  return std::any_of(std::begin(kReasons), std::end(kReasons),
                     [&](const char* reason) { return output.find(reason) != std::string::npos; });
}

/// Compiles <name>.cpp in `folder` to <name>.so. It has succeeded only if that file exists, since
/// the compiler's status may be unknown.
ProcessResult compile_file(std::vector<std::string> command, const std::string& name,
                           const fs::path& folder, double seconds) {
  const std::vector<std::string> options = compiler_options();
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), {"-o", name + ".so", name + ".cpp"});
  ProcessResult result = run_process(command, folder, seconds);
  std::error_code error;
  result.succeeded = result.succeeded && fs::exists(folder / (name + ".so"), error);
  return result;
}

void keep_log(const Variant::Impl& variant, const std::string& log) {
  const std::scoped_lock lock(variant.log_mutex);
  variant.log = log;
}

Status compile(const Variant::Impl& variant, const std::string& source,
               const std::vector<std::string>& compiler, const fs::path& folder) {
  bool written = !folder.empty() && write_file(folder / "variant.cpp", source);
  for (const EmbeddedSource& file : embedded_sources()) {
    if (std::string_view(file.path).starts_with("kernels/")) continue;  // headers for GPUs
    written = written && write_file(folder / file.path, file.text);
  }
  if (!written) {
    return error(StatusCode::kUnsupported,
                 "variant: expected a temporary folder to compile in (TMPDIR names another one), "
                 "got %s",
                 std::strerror(errno));
  }
  const double seconds = compile_seconds();
  const ProcessResult result = compile_file(compiler, "variant", folder, seconds);
  const char* name = variant.name.c_str();
  keep_log(variant, result.output);
  switch (result.outcome) {
    case ProcessResult::Outcome::kNotStarted:
      return error(StatusCode::kUnsupported, "variant: expected to start %.100s, got \"%s\"",
                   compiler[0].c_str(), std::strerror(result.error));
    case ProcessResult::Outcome::kTimeout:
      return error(StatusCode::kInvalidArgument,
                   "variant: expected \"%s\" to compile within %g s (FLASHPLAN_COMPILE_SECONDS), "
                   "got no end",
                   name, seconds);
    case ProcessResult::Outcome::kEnded: break;
  }
  if (result.succeeded) return {};
  if (has_no_room(result.output)) {
    return error(StatusCode::kUnsupported,
                 "variant: expected room for temporary files (TMPDIR names another folder), got "
                 "%.150s",
                 first_error(result.output).c_str());
  }
  // Compiles the headers alone, to find out whether the user's source is wrong or the compiler
  // fails without it, too.
  const bool works = write_file(folder / "headers.cpp", kHeaders) &&
                     compile_file(compiler, "headers", folder, seconds).succeeded;
  if (!works) {
    return error(StatusCode::kUnsupported,
                 "variant: expected a compiler of C++20 that works (CXX, FLASHPLAN_CXXFLAGS), got "
                 "%.50s: %.120s",
                 compiler[0].c_str(), first_error(result.output).c_str());
  }
  return error(StatusCode::kInvalidArgument,
               "variant: expected source of \"%s\" that compiles, got %.150s", name,
               first_error(result.output).c_str());
}

/// Loads code from the cache. Null if the cache does not have it, or this process can not load it.
RunQueue load_cached(const DiskCache& cache, const std::string& key) {
  const std::optional<std::string> code = cache.load(key);
  return code ? load_code(*code) : nullptr;
}

/// Loads or compiles the code of the options' variant. The caller holds the mutex of `code`.
Status make_code(const AttentionOptions& options, const std::string& source,
                 const std::vector<std::string>& compiler, const std::string& key, Compiled* code) {
  const DiskCache cache;
  code->run_queue = load_cached(cache, key);
  if (code->run_queue != nullptr) return {};
  const DiskCache::Lock lock(cache, key);
  code->run_queue = load_cached(cache, key);  // another process may have compiled it
  if (code->run_queue != nullptr) return {};
  const Variant::Impl& variant = *options.variant.impl();
  const TemporaryFolder folder;
  FLASHPLAN_RETURN_IF_ERROR(compile(variant, source, compiler, folder.path()));
  const fs::path library = folder.path() / "variant.so";
  std::ifstream file(library, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(file)),
                            std::istreambuf_iterator<char>());
  code->run_queue = load_file(library);
  // Code in the temporary folder can not be loaded if its file system forbids programs (noexec).
  if (code->run_queue == nullptr) code->run_queue = load_code(content);
  if (code->run_queue == nullptr) {
    const char* reason = ::dlerror();
    return error(StatusCode::kUnsupported,
                 "variant: expected code of \"%.50s\" that can be loaded (TMPDIR may name another "
                 "folder for it), got \"%.120s\"",
                 variant.name.c_str(), reason != nullptr ? reason : "no code");
  }
  cache.store(key, content);
  return {};
}

}  // namespace

Status find_compiler() noexcept try {
  return compiler_command().empty() ? no_compiler() : Status();
} catch (const std::exception&) {
  return error(StatusCode::kOutOfMemory,
               "variant: expected memory to look for a compiler, got none");
}

Status compile_variant(const AttentionOptions& options, Kernel* kernel) noexcept try {
  const std::vector<std::string> compiler = compiler_command();
  if (compiler.empty()) return no_compiler();
  const std::string source = program_source(options);
  const std::string key = cache_key(source, compiler);
  Compiled& code = Registry<Compiled>::instance().at(key);
  const std::scoped_lock lock(code.mutex);
  if (code.run_queue == nullptr) {
    code.kernel_name = std::string(kernel->name) + "_" + options.variant.name();
    FLASHPLAN_RETURN_IF_ERROR(make_code(options, source, compiler, key, &code));
  }
  kernel->name = code.kernel_name;
  kernel->code.run_queue = code.run_queue;
  return {};
} catch (const std::exception&) {
  return error(StatusCode::kOutOfMemory, "variant: expected memory to compile it, got none");
}

}  // namespace flashplan::cpu
