// Fake NVRTC and hipRTC: the host's C++ compiler compiles, and the code object is a shared library
// with a checksum appended.
//
// FAKE_RTC_FAIL fails every compilation, with its text in the log. FAKE_RTC_SECONDS is the least
// time of each. FAKE_RTC_COUNT names a file that gets a byte for each. FAKE_RTC_VERSION is the
// version, such as 13.0.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <initializer_list>
#include <spawn.h>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

extern char **environ;

#define EXPORT extern "C" __attribute__((visibility("default")))
#ifdef FAKE_HIPRTC
#define NAMED(name) hiprtc##name
#define PREFIX "HIPRTC"
#define CODE_SIZE hiprtcGetCodeSize
#define CODE hiprtcGetCode
#else
#define NAMED(name) nvrtc##name
#define PREFIX "NVRTC"
#define CODE_SIZE nvrtcGetCUBINSize
#define CODE nvrtcGetCUBIN
#endif

namespace {

// nvrtc.h and hiprtc.h have the same numbers.
enum Result { SUCCESS, OUT_OF_MEMORY, PROGRAM_CREATION_FAILURE, INVALID_INPUT, INVALID_PROGRAM, INVALID_OPTION, COMPILATION };
const char *const RESULTS[] = {
    PREFIX "_SUCCESS", PREFIX "_ERROR_OUT_OF_MEMORY", PREFIX "_ERROR_PROGRAM_CREATION_FAILURE", PREFIX "_ERROR_INVALID_INPUT",
    PREFIX "_ERROR_INVALID_PROGRAM", PREFIX "_ERROR_INVALID_OPTION", PREFIX "_ERROR_COMPILATION",
};

struct Program {
    std::string source, name, log, code;
};

std::string setting(const char *name) {
    const char *text = getenv(name);
    return text ? text : "";
}

std::string content(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

uint64_t checksum(const std::string &bytes) {  // FNV-1a
    uint64_t sum = 0xCBF29CE484222325u;
    for (unsigned char byte : bytes) sum = (sum ^ byte) * 0x100000001B3u;
    return sum;
}

bool begins(const std::string &text, const char *with, std::string *rest) {
    if (text.rfind(with, 0)) return false;
    *rest = text.substr(strlen(with));
    return true;
}

bool among(const std::string &text, std::initializer_list<const char *> words) {
    for (const char *word : words) {
        if (text == word) return true;
    }
    return false;
}

// Translates an option for the host's compiler; false for one that the real compiler refuses.
bool translate(const std::string &option, std::string *arch, std::vector<std::string> *flags) {
    std::string rest;
    if (begins(option, "-D", &rest) || begins(option, "--define-macro=", &rest)) return flags->push_back("-D" + rest), true;
#ifdef FAKE_HIPRTC
    if (begins(option, "--offload-arch=", arch)) return among(arch->substr(0, arch->find(':')), {"gfx90a", "gfx942", "gfx950"});
    return among(option, {"-O1", "-O2", "-O3", "-std=c++14", "-std=c++17", "-std=c++20", "-ffp-contract=on", "-ffp-contract=off", "-ffp-contract=fast", "-w"});
#else
    if (begins(option, "--gpu-architecture=", arch) || begins(option, "-arch=", arch))
        return among(*arch, {"sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_110", "sm_120", "sm_121"});
    if (begins(option, "--maxrregcount=", &rest) || begins(option, "--fmad=", &rest)) return true;
    return among(option, {"--std=c++14", "--std=c++17", "--std=c++20", "-std=c++14", "-std=c++17", "-std=c++20", "-default-device",
                          "--device-as-default-execution-space", "--restrict", "-restrict", "-w", "--disable-warnings", "--use_fast_math"});
#endif
}

int run(const std::vector<std::string> &command, const std::string &log_path) {
    std::vector<char *> words;
    for (const std::string &word : command) words.push_back(const_cast<char *>(word.c_str()));
    words.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    pid_t child;
    int status = -1;
    const int failed = posix_spawn(&child, words[0], &files, nullptr, words.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    return !failed && waitpid(child, &status, 0) == child ? status : -1;
}

Result build(Program &program, const std::string &arch, std::vector<std::string> flags) {
    std::string folder = setting("TMPDIR").empty() ? "/tmp" : setting("TMPDIR");
    folder += "/fake-rtc-XXXXXX";
    if (!mkdtemp(folder.data())) return OUT_OF_MEMORY;
    const std::string source = folder + "/program.cpp", library = folder + "/program.so", log_path = folder + "/log";
    std::ofstream(source) << "#line 1 \"" << program.name << "\"\n" << program.source << "\nextern \"C\" {\nextern const unsigned host_args_bytes;\n"
                          << "const unsigned host_args_bytes = sizeof(Args);\n}\n";
    std::vector<std::string> command = {COMPILER, "-O1", "-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique", "-Wall", "-Wno-unknown-pragmas",
                                        "-DSKINNY_HOST", "-DFAKE_ARCH=\"" + arch + "\""};
    command.push_back(arch[0] == 'g' ? "-DFAKE_WAVE=64" : "-DFAKE_WAVE=32");
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"-include", HOST_H, source, "-o", library});
    const int status = run(command, log_path);
    program.log = content(log_path);
    program.code = content(library);
    for (const std::string &file : {source, library, log_path}) unlink(file.c_str());
    rmdir(folder.c_str());
    if (status || program.code.empty()) return COMPILATION;
    const uint64_t sum = checksum(program.code);
    program.code.append((const char *)&sum, sizeof sum);
    return SUCCESS;
}

Result refuse(Program &program, Result result, const std::string &log) {
    program.log = log + "\n";
    return result;
}

} // namespace

EXPORT const char *NAMED(GetErrorString)(int result) {
    return result >= 0 && result < (int)(sizeof RESULTS / sizeof *RESULTS) ? RESULTS[result] : PREFIX "_ERROR unknown";
}

EXPORT int NAMED(Version)(int *major, int *minor) {
    if (!major || !minor) return INVALID_INPUT;
    *major = 13;
    *minor = 0;
    if (const std::string version = setting("FAKE_RTC_VERSION"); !version.empty()) sscanf(version.c_str(), "%d.%d", major, minor);
    return SUCCESS;
}

EXPORT int NAMED(CreateProgram)(Program **made, const char *source, const char *name, int count, const char *const *, const char *const *) {
    if (!made || !source || count) return INVALID_INPUT;
    *made = new Program{source, name ? name : "default_program", "", ""};
    return SUCCESS;
}

EXPORT int NAMED(DestroyProgram)(Program **program) {
    if (!program || !*program) return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

EXPORT int NAMED(CompileProgram)(Program *program, int count, const char *const *options) {
    if (!program) return INVALID_PROGRAM;
    std::string arch;
    std::vector<std::string> flags;
    for (int i = 0; i < count; i++) {
        if (!translate(options[i], &arch, &flags)) return refuse(*program, INVALID_OPTION, std::string("error: unrecognized option ") + options[i]);
    }
    if (arch.empty()) return refuse(*program, INVALID_OPTION, "error: no architecture");
    if (const std::string path = setting("FAKE_RTC_COUNT"); !path.empty()) std::ofstream(path, std::ios::app) << '.';
    if (const std::string text = setting("FAKE_RTC_SECONDS"); !text.empty())
        std::this_thread::sleep_for(std::chrono::duration<double>(atof(text.c_str())));
    if (const std::string text = setting("FAKE_RTC_FAIL"); !text.empty())
        return refuse(*program, COMPILATION, program->name + "(12): error: " + text + "\n\n1 error detected in the compilation of \"" + program->name + "\".");
    return build(*program, arch, flags);
}

EXPORT int NAMED(GetProgramLogSize)(Program *program, size_t *size) {
    if (!program || !size) return INVALID_INPUT;
    *size = program->log.size() + 1;
    return SUCCESS;
}

EXPORT int NAMED(GetProgramLog)(Program *program, char *log) {
    if (!program || !log) return INVALID_INPUT;
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

EXPORT int CODE_SIZE(Program *program, size_t *size) {
    if (!program || !size) return INVALID_INPUT;
    if (program->code.empty()) return INVALID_PROGRAM;
    *size = program->code.size();
    return SUCCESS;
}

EXPORT int CODE(Program *program, char *code) {
    if (!program || !code) return INVALID_INPUT;
    if (program->code.empty()) return INVALID_PROGRAM;
    memcpy(code, program->code.data(), program->code.size());
    return SUCCESS;
}
