/* Code objects: ELF64 files whose dynamic symbols "<kernel>.kd" are kernel descriptors (LLVM's AMDGPU user guide). */
#include "fake.h"
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#define MACHINE_AMDGPU 224
#define DESCRIPTOR_KERNARG 8 /* byte of kernarg_size in a descriptor */

static const char *architecture(uint32_t flags) {
    switch (flags & 0xFF) {
    case 0x3F: return "gfx90a";
    case 0x4C: return "gfx942";
    case 0x4F: return "gfx950";
    default: return "another architecture";
    }
}

static int add(Function **found, const char *gfx, const char *symbol, const unsigned char *descriptor) {
    const size_t length = strlen(symbol);
    Function *made;
    if (length < 4 || length > 250 || strcmp(symbol + length - 3, ".kd"))
        return SUCCESS;
    made = calloc(1, sizeof *made);
    made->marker = 0x4B45524E;
    strcpy(made->gfx, gfx);
    memcpy(made->name, symbol, length - 3);
    memcpy(&made->kernarg_bytes, descriptor + DESCRIPTOR_KERNARG, 4);
    made->next = *found;
    *found = made;
    return SUCCESS;
}

int read_object(const unsigned char *image, Function **found) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    const char *gfx, *mine = getenv("FAKE_GFX");
    int i;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_machine != MACHINE_AMDGPU)
        return refuse(INVALID_IMAGE, "no code object");
    gfx = architecture(header->e_flags);
    if (strcmp(gfx, mine ? mine : "gfx942"))
        return refuse(NO_BINARY, "code for %s", gfx);
    for (i = 0; i < header->e_shnum; i++) {
        const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff), *table = &sections[i];
        const char *strings;
        size_t each;
        if (table->sh_type != SHT_DYNSYM)
            continue;
        strings = (const char *)image + sections[table->sh_link].sh_offset;
        for (each = 1; each < table->sh_size / sizeof(Elf64_Sym); each++) {
            const Elf64_Sym *symbol = (const Elf64_Sym *)(image + table->sh_offset) + each;
            const Elf64_Shdr *where = &sections[symbol->st_shndx];
            if (symbol->st_shndx == SHN_UNDEF || symbol->st_shndx >= header->e_shnum)
                continue;
            add(found, gfx, strings + symbol->st_name, image + where->sh_offset + (symbol->st_value - where->sh_addr));
        }
    }
    return *found ? SUCCESS : refuse(INVALID_IMAGE, "no kernel descriptors");
}
